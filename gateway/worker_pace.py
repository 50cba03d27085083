"""Slowing a worker down on purpose, to compare what a run would be with what it then is.

`POST /dockyard/workers/{role}/pace` with `{"factor": 2.0}`: every step of that worker takes twice its time,
until the next such call. It answers to this host alone, whatever address the gateway listens on, and not to
pages in a browser of this host: those send an `Origin`, and cannot send JSON without asking first.
"""

import ipaddress
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import msgspec

from engine.errors import InvalidRequest

MAX_FACTOR = 100.0

SetPace = Callable[[str, float], Coroutine[Any, Any, None]]
"""Sets the pace of the worker of that role; raises InvalidInput, naming the roles, where there is none."""


class PaceBody(msgspec.Struct, forbid_unknown_fields=True):
    """`factor`: the length of a step in its own lengths, 1.0 (as fast as it goes) to 100.0."""

    factor: Annotated[float, msgspec.Meta(ge=1.0, le=MAX_FACTOR)]


def parse_pace(body: bytes) -> float:
    """The factor. Raises InvalidRequest that names the field."""
    try:
        return msgspec.json.decode(body, type=PaceBody).factor
    except msgspec.DecodeError as error:  # a ValidationError is one too
        raise InvalidRequest(
            f"pace: {error}", parameter="factor", hint=f'send {{"factor": 2.0}}, from 1 to {MAX_FACTOR:g}'
        ) from error


def is_json(content_type: str) -> bool:
    """Whether a `content-type` header says JSON, with or without parameters."""
    return content_type.partition(";")[0].strip().lower() == "application/json"


def is_this_host(address: str | None) -> bool:
    """Whether a request came over the loopback interface; an address that cannot be read did not."""
    try:
        return address is not None and ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
