"""What if: the run again, with some intervals longer or shorter.

By recomputation, never by subtracting from the path, since a shorter interval may put another chain on it.
Each interval starts as long after its predecessors as it did; a wait or queue ends as long after its sources
as it did; one that nothing explains keeps its length, like a timer.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from protocol.errors import InvalidInput
from protocol.events import Interval, IntervalKind
from teams.critical_path import NS_PER_S, Path, walk
from teams.dag_network import WAITS, Network, Times


@dataclass(frozen=True, slots=True)
class Scale:
    """Multiply the duration of every interval that fits all that is given. Waits and queues never are."""

    factor: float
    kind: IntervalKind | None = None
    agent: str | None = None
    name: str | None = None
    where: Callable[[Interval], bool] | None = None

    def fits(self, interval: Interval) -> bool:
        return (
            interval.kind not in WAITS
            and (self.kind is None or interval.kind == self.kind)
            and (self.agent is None or interval.agent == self.agent)
            and (self.name is None or interval.name == self.name)
            and (self.where is None or self.where(interval))
        )


@dataclass(frozen=True, slots=True)
class Add:
    """Make one interval longer by so many seconds (shorter, where negative; never below zero)."""

    interval: str
    seconds: float


Change = Scale | Add


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The recomputed run."""

    path: Path
    recorded_makespan_ns: int

    @property
    def makespan_s(self) -> float:
        return self.path.makespan_s

    @property
    def saved_s(self) -> float:
        """Seconds by which the run would have been shorter; negative where it would have been longer."""
        return (self.recorded_makespan_ns - self.path.makespan_ns) / NS_PER_S


def what_if(network: Network, changes: Sequence[Change]) -> WhatIf:
    """Recompute the run with the changes applied in order; InvalidInput where one cannot be."""
    times = network.recorded
    durations = [times.duration_ns(i) for i in range(len(network.intervals))]
    for change in changes:
        if isinstance(change, Scale):
            _scale(network, durations, change)
        else:
            _add(network, durations, change)
    return WhatIf(walk(network, simulate(network, durations)), network.makespan_ns(times))


def simulate(network: Network, durations_ns: Sequence[int]) -> Times:
    """The times of the run with these durations; those of held waits follow from their sources."""
    num, recorded = len(network.intervals), network.recorded
    times = Times([0] * num, [0] * num)
    for event in network.order:
        if event >= num:
            index = event - num
            arcs = network.end_arcs[index]
            after_ns = max(times.start_ns[index], *(times.point(arc) for arc in arcs))
            times.end_ns[index] = after_ns + arcs[0].lag_ns
            continue
        arcs = network.start_arcs[event]
        times.start_ns[event] = (
            max(times.point(arc) for arc in arcs) + arcs[0].lag_ns if arcs else recorded.start_ns[event]
        )
        if not network.is_held(event):
            times.end_ns[event] = times.start_ns[event] + durations_ns[event]
    return times


def _scale(network: Network, durations: list[int], scale: Scale) -> None:
    if not math.isfinite(scale.factor) or scale.factor < 0:
        raise InvalidInput(f"what-if: factor {scale.factor} is not a number from 0 up", hint="2.0 doubles")
    for index, interval in enumerate(network.intervals):
        if scale.fits(interval):
            durations[index] = round(durations[index] * scale.factor)


def _add(network: Network, durations: list[int], add: Add) -> None:
    index = next((i for i, interval in enumerate(network.intervals) if interval.id == add.interval), None)
    if index is None:
        raise InvalidInput(f"what-if: no interval {add.interval!r} in this run")
    if network.is_held(index):
        raise InvalidInput(
            f"what-if: {add.interval!r} is a wait, which ends when its sources do",
            hint="change an interval that it waits for",
        )
    if not math.isfinite(add.seconds):
        raise InvalidInput(f"what-if: {add.seconds} seconds is not a length of time")
    durations[index] = max(0, durations[index] + round(add.seconds * NS_PER_S))
