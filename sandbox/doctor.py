"""What this host can do for sandboxes, found by trying each thing."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Status = Literal["enforced", "degraded", "missing", "unverified"]


@dataclass(frozen=True, slots=True)
class Capability:
    name: str
    status: Status
    detail: str
    cost: str = ""
    fix: str = ""


def probe(*, state_dir: Path | None = None, toolkit: Path | None = None) -> tuple[Capability, ...]:
    return ()
