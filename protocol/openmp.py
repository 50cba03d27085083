"""How long OpenMP's threads wait awake for their next part of a step.

To wake them at each of some hundred parts takes as long as the work; to spin for long (libgomp's own choice
is 300,000 turns where nobody else seems to run) takes the cores from whatever runs beside, another worker of
ours first: both together then do half as much, and a step of milliseconds takes seconds.

The environment alone says so to libgomp, as torch is loaded: hence this module reads and writes it, too, and
not only `cluster/config.py`, which an engine in one's own process does not have.
"""

import os
import sys
from collections.abc import Mapping

_SPIN = {"GOMP_SPINCOUNT": "2000"}
_CHOSEN_BY = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def brief_spin(environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to this environment: nothing where its user has chosen."""
    return {} if any(name in environment for name in _CHOSEN_BY) else dict(_SPIN)


def spin_briefly() -> None:
    """For this process and those that it starts, unless its user has chosen. libgomp reads it once, when
    torch is loaded: too late where that has happened."""
    if "torch" not in sys.modules:
        os.environ.update(brief_spin(os.environ))
