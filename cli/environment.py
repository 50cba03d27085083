"""Variables that a command hands to sandboxes: by name, so that their values are in no list of processes."""

import os
from collections.abc import Sequence
from typing import Annotated

import typer

from protocol.errors import InvalidInput

EnvOption = Annotated[
    list[str] | None,
    typer.Option(
        "--env",
        "-e",
        help="NAME=VALUE for what runs in sandboxes; or NAME alone, with the value that it has in this "
        "shell, which then no list of processes shows. Can be repeated.",
    ),
]


def given_environment(words: Sequence[str] | None) -> dict[str, str]:
    """Raises InvalidInput for a name that has no value; says no value."""
    found: dict[str, str] = {}
    for word in words or ():
        name, is_given, value = word.partition("=")
        if not name:
            raise InvalidInput("--env: a variable without a name", hint="write NAME=VALUE")
        if not is_given and name not in os.environ:
            raise InvalidInput(f"--env {name}: this shell has no such variable", hint="write NAME=VALUE")
        found[name] = value if is_given else os.environ[name]
    return found
