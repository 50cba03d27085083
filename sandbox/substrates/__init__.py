"""Ways to make a sandbox, by name."""

from typing import Literal, get_args

from sandbox.errors import InvalidArgument
from sandbox.substrates.base import Substrate
from sandbox.substrates.container import ContainerSubstrate
from sandbox.substrates.function import FunctionSubstrate

SubstrateName = Literal["function", "container"]
SUBSTRATES: dict[SubstrateName, Substrate] = {
    "function": FunctionSubstrate(),
    "container": ContainerSubstrate(),
}


def find_substrate(name: str) -> Substrate:
    """The substrate of that name. InvalidArgument when there is none."""
    for known in get_args(SubstrateName):
        if known == name:
            return SUBSTRATES[known]
    known_names = "' or '".join(get_args(SubstrateName))
    raise InvalidArgument(f"substrate={name!r} is unknown", hint=f"use '{known_names}'")
