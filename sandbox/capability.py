"""What a host can do for sandboxes, one thing at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Literal, ParamSpec

from protocol.errors import DockyardError

P = ParamSpec("P")
Status = Literal["enforced", "degraded", "missing", "unverified"]


@dataclass(frozen=True, slots=True)
class Capability:
    """One protection or tool. `cost` is what one goes without where it is not enforced, `fix` the way out."""

    name: str
    status: Status
    detail: str
    cost: str = ""
    fix: str = ""


def finding(name: str) -> Callable[[Callable[P, Capability]], Callable[P, Capability]]:
    """Of a function that tries something: what it raises is a finding as well, of this name, in which `{}` is
    the function's first argument. An interrupt goes on."""

    def decorate(attempt: Callable[P, Capability]) -> Callable[P, Capability]:
        @wraps(attempt)
        def tried(*args: P.args, **options: P.kwargs) -> Capability:
            try:
                return attempt(*args, **options)
            except Exception as error:
                detail, fix = f"{type(error).__name__}: {error}", "close or end something, and try again"
                if isinstance(error, DockyardError):
                    detail, fix = error.message, error.hint
                cost = "it could not be tried, so nobody knows whether this host has it"
                return Capability(name.format(*args), "unverified", detail, cost, fix)

        return tried

    return decorate
