"""The folder of all that Dockyard keeps for a user. It is the one setting that sandboxes made from Python
have in common with a deployment, and is read here since they may not import its tree of settings."""

import os
from pathlib import Path

from protocol.errors import InvalidInput


def default_home(refusal: type[InvalidInput] = InvalidInput) -> Path:
    """DOCKYARD_HOME, else `dockyard` in XDG_STATE_HOME, else ~/.local/state/dockyard. Raises `refusal` where
    there is none."""
    if home := os.environ.get("DOCKYARD_HOME"):
        return Path(home).absolute()
    if base := os.environ.get("XDG_STATE_HOME"):
        return Path(base).absolute() / "dockyard"
    try:
        return Path.home().absolute() / ".local" / "state" / "dockyard"
    except RuntimeError:
        words = f"uid {os.getuid()} has no home directory that this machine knows of"
        raise refusal(words, hint="set DOCKYARD_HOME, or HOME") from None
