"""Sums of resources that come out exact: CPUs are counted in thousandths, everything else in whole units."""

import math
from dataclasses import dataclass

from placement.topology import gib
from protocol.errors import InvalidInput
from protocol.resources import Resources

_FIELDS = ("milli_cpus", "memory_bytes", "pids", "disk_bytes", "gpus")


@dataclass(frozen=True, slots=True)
class Amounts:
    """`Resources` in whole numbers: adding and taking away again gives exactly what there was."""

    milli_cpus: int = 0
    memory_bytes: int = 0
    pids: int = 0
    disk_bytes: int = 0
    gpus: int = 0

    def plus(self, other: "Amounts", times: int = 1) -> "Amounts":
        return Amounts(*(getattr(self, name) + times * getattr(other, name) for name in _FIELDS))

    def minus(self, other: "Amounts") -> "Amounts":
        return self.plus(other, -1)

    def fits_into(self, room: "Amounts") -> bool:
        return all(getattr(self, name) <= getattr(room, name) for name in _FIELDS)

    def largest_share_of(self, capacity: "Amounts") -> float:
        """The largest part that this takes of any amount; infinite where the capacity has none of it."""
        return max(_share(getattr(self, name), getattr(capacity, name)) for name in _FIELDS)

    def lacking(self, room: "Amounts") -> str:
        """What of this `room` does not hold, for people: `memory 512 MiB of which 100 MiB free`."""
        lacks = [name for name in _FIELDS if getattr(self, name) > getattr(room, name)]
        return ", ".join(
            f"needs {_shown(name, getattr(self, name))}, {_shown(name, max(0, getattr(room, name)))} free"
            for name in lacks
        )


def needed(resources: Resources) -> Amounts:
    """What a thing asks for, fractions of CPUs rounded up. InvalidInput names a field that is no amount."""
    return _amounts(resources, round_up=True)


def available(resources: Resources) -> Amounts:
    """What a bin has, fractions of CPUs rounded down."""
    return _amounts(resources, round_up=False)


def _amounts(resources: Resources, *, round_up: bool) -> Amounts:
    if not math.isfinite(resources.cpus) or resources.cpus < 0:
        raise InvalidInput(f"cpus: {resources.cpus} is no amount", hint="give 0 or more")
    for name in _FIELDS[1:]:
        if getattr(resources, name) < 0:
            raise InvalidInput(f"{name}: {getattr(resources, name)} is no amount", hint="give 0 or more")
    # 0.1 * 1000 may come out a hair above 100: cut at a millionth before rounding.
    milli = round(resources.cpus * 1000, 6)
    return Amounts(
        math.ceil(milli) if round_up else math.floor(milli),
        resources.memory_bytes,
        resources.pids,
        resources.disk_bytes,
        resources.gpus,
    )


def _share(part: int, whole: int) -> float:
    if part == 0:
        return 0.0
    return part / whole if whole else math.inf


def _shown(name: str, amount: int) -> str:
    match name:
        case "milli_cpus":
            return f"{amount / 1000:g} cpus"
        case "memory_bytes":
            return f"{gib(amount)} memory"
        case "disk_bytes":
            return f"{gib(amount)} disk"
        case _:
            return f"{amount} {name}"
