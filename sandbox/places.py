"""Where things lie when the caller does not say: the same places for set-up, the command line and sandboxes
made from Python. Whoever needs one of them takes it from here."""

import os
from pathlib import Path
from types import NoneType

from protocol import home
from sandbox.arguments import check_type
from sandbox.errors import AuthError, InvalidArgument

# Built from sandbox/native at set-up.
INIT_BINARY = Path(__file__).parent / "native" / "dockyard-init"
# Built from sandbox/egress at set-up, where there is a compiler for it.
EGRESS_OBJECT = Path(__file__).parent / "egress" / "egress.bpf.o"
# Built from sandbox/guard at set-up, likewise.
GUARD_OBJECT = Path(__file__).parent / "guard" / "guard.bpf.o"

JOURNAL = "sandboxes"  # in a state directory
# How long a version that a newer one has replaced is kept: longer than a sandbox that started on it lives.
SUPERSEDED_S = 86_400.0


def default_home() -> Path:
    """That of all of Dockyard, `protocol.home`. Raises InvalidArgument where there is none."""
    return home.default_home(InvalidArgument)


def default_state_dir() -> Path:
    """Skeletons and journal: what `dockyard down` sweeps."""
    return default_home() / "sandbox"


def chosen_state_dir(state_dir: Path | str | None) -> Path:
    """The caller's, or the default one. AuthError where it, or what keeps its journal, is another user's and
    closed to this one: whoever enters a state directory does so by this."""
    check_type("state_dir", state_dir, str, Path, NoneType)
    state = Path(state_dir).absolute() if state_dir is not None else default_state_dir()
    check_open(state)
    check_open(state / JOURNAL)
    return state


def check_open(folder: Path) -> None:
    """Raises AuthError for one that another user keeps to himself, or that lies in such a one."""
    if _is_closed(folder):
        raise AuthError(f"{folder} is another user's", hint="ask as its user, or as root")


def _is_closed(place: Path) -> bool:
    try:
        is_own = place.stat().st_uid == os.geteuid()
    except PermissionError:
        return True
    except (OSError, ValueError):  # it is not there, or no name of a file
        return False
    # One of this user's own, as on a disk that nobody can write to, says so itself.
    return not is_own and not os.access(place, os.R_OK | os.W_OK | os.X_OK, effective_ids=True)


def make_folder(place: Path, mode: int = 0o755) -> None:
    """With those above it that are not there. Whatever the umask, nobody but who makes them writes there."""
    if not place.parent.is_dir():
        make_folder(place.parent)
    place.mkdir(mode=mode, exist_ok=True)


def default_toolkit(state_dir: Path) -> Path:
    """The toolkit that belongs to a state directory: beside it, since one toolkit serves several."""
    return state_dir.parent / "toolkit"


def helper_socket(uid: int | None = None) -> Path:
    """Where the helper with root listens for a user, by default this one: DOCKYARD_HELPER, else
    /run/dockyard/helper-UID.sock. Only root can make one that is believed."""
    if uid is None and (place := os.environ.get("DOCKYARD_HELPER")):
        return Path(place)
    return Path("/run/dockyard") / f"helper-{os.geteuid() if uid is None else uid}.sock"
