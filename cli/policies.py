"""Which policy a sandbox is made with: one of a file, or a preset by its name."""

from pathlib import Path
from typing import Annotated

import typer

from sandbox import Policy
from sandbox.errors import InvalidArgument
from sandbox.policy.document import read_policy
from sandbox.policy.presets import PresetName, preset

PolicyOption = Annotated[
    Path | None,
    typer.Option(
        "--policy",
        metavar="FILE",
        help='JSON of a policy, such as {"network": {"services": ["pypi"]}}; docs/sandbox.md has the fields. '
        "Default: no network.",
    ),
]
PresetOption = Annotated[
    PresetName | None,
    typer.Option(
        "--preset",
        help="A policy by its name. Those with a network need root or the helper; agent needs --gateway.",
    ),
]
GatewayOption = Annotated[
    str | None,
    typer.Option("--gateway", metavar="ADDR:PORT", help="All that --preset agent reaches."),
]


def chosen_policy(file: Path | None, name: PresetName | None, gateway: str | None) -> Policy:
    """Without any of them: no network.

    Raises InvalidArgument for a file that is no policy, and for options that do not go together.
    """
    if file is not None and name is not None:
        raise InvalidArgument(f"--policy {file} and --preset {name} are two policies", hint="give one")
    if name is not None:
        return _preset(name, gateway)
    if gateway is not None:
        raise InvalidArgument(f"--gateway {gateway} is for --preset agent", hint="add that, or leave it out")
    return Policy(network="none") if file is None else _read(file)


def _preset(name: PresetName, gateway: str | None) -> Policy:
    if name == "agent" and gateway is None:
        hint = "such as --gateway 10.0.0.5:8000, where the gateway listens"
        raise InvalidArgument("--preset agent needs --gateway ADDR:PORT", hint=hint)
    return preset(name, gateway=gateway)


def _read(file: Path) -> Policy:
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text in UTF-8"
        raise InvalidArgument(f"--policy {file}: {why}", hint="give a file with a policy in JSON") from error
    return read_policy(text)
