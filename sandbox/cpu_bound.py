"""How many cores the groups above a sandbox's have: version 1 of cgroups gives no child a larger share than
its parent's, and in version 2 a larger one means nothing."""

from collections.abc import Sequence
from pathlib import Path

from sandbox.cgroups import TOP, Hierarchy
from sandbox.kernel_files import read_small


def cpu_bound(hierarchies: Sequence[Hierarchy], state: str) -> float | None:
    """The fewest cores of any group above those of a state's sandboxes, such as a helper's `--cpu` or a
    container's own limit; None where none is bounded."""
    found = [
        share(place, each.version)
        for each in hierarchies
        if "cpu" in each.controllers
        for place in (each.root, each.root / TOP, each.root / TOP / state)
    ]
    return min((each for each in found if each is not None), default=None)


def share(group: Path, version: int) -> float | None:
    """A group's own, in cores; None without a limit, or where it is not there (yet)."""
    try:
        if version == 2:
            quota, period = read_small(group / "cpu.max").split()
        elif (quota := read_small(group / "cpu.cfs_quota_us").strip()) != "-1":
            period = read_small(group / "cpu.cfs_period_us").strip()
        else:
            return None
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None
