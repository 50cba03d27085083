"""What a host can do for sandboxes, one thing at a time."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["enforced", "degraded", "missing", "unverified"]


@dataclass(frozen=True, slots=True)
class Capability:
    """One protection or tool. `cost` is what one goes without where it is not enforced, `fix` the way out."""

    name: str
    status: Status
    detail: str
    cost: str = ""
    fix: str = ""
