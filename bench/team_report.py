"""The object of a bench on the live stack, which has no peer.

As `bench.common`, but for one thing: how much of the machine went to others is measured by the bench while
its server runs. Afterwards the times of the server's workers are gone, and would count as those of others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.common import Surroundings, is_noisy

PACKAGES = ("torch", "ray", "openai")


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found against what it should be. `met`: every part reached its target."""

    name: str
    value: float
    unit: str
    target: float
    met: bool


def report(
    found: Finding, surroundings: Surroundings, others: float, detail: Mapping[str, Any]
) -> dict[str, Any]:
    """The bench's object, the stable fields first. `others`: share (0..1) of the machine."""
    env = surroundings.describe() | {"others": round(others, 3)}
    noisy = is_noisy(env["cpu_pressure"], others)
    return {
        "name": found.name,
        "value": round(found.value, 4),
        "unit": found.unit,
        "peer": None,
        "peer_value": None,
        "ratio": None,
        "target": found.target,
        "met": None if noisy else found.met,
        "noisy": noisy,
        "env": env,
        **detail,
    }
