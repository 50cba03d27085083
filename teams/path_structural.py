"""Longest chains of dependent work: the structural path, and critical steps.

The structural path counts work and leaves out waits and delays: it is how long the run would take with
unlimited parallelism and no overhead, a lower bound of the makespan. Critical steps count model calls
instead of time along the longest chain; where a run is made of stages with a barrier (a lead, then
sub-agents in parallel, then the lead again) this is the sum over stages of main steps plus the longest
sub-agent's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.events import IntervalKind
from teams.critical_path import NS_PER_S
from teams.dag_network import END, WAITS, Arc, Network


@dataclass(frozen=True, slots=True)
class StructuralPath:
    """A longest chain of dependent work; `intervals` are the ids that it goes through, waits left out."""

    intervals: tuple[str, ...]
    length_ns: int
    work_ns: int

    @property
    def length_s(self) -> float:
        """Seconds of the longest chain: the run's makespan with unlimited parallelism."""
        return self.length_ns / NS_PER_S

    @property
    def parallelism(self) -> float:
        """All work over the longest chain; 1.0 for a run without work."""
        return self.work_ns / self.length_ns if self.length_ns else 1.0


def structural_path(network: Network) -> StructuralPath:
    """The longest chain of work, in time."""
    weights = [
        0 if interval.kind in WAITS else network.recorded.duration_ns(index)
        for index, interval in enumerate(network.intervals)
    ]
    chain = _Chain(network, weights)
    chain.run()
    ids = tuple(network.intervals[i].id for i in chain.longest() if network.intervals[i].kind not in WAITS)
    return StructuralPath(ids, max(chain.at_end), sum(weights))


def critical_steps(network: Network, kind: IntervalKind = "model.decode") -> int:
    """The number of steps on the longest chain; a step is one interval of `kind`."""
    chain = _Chain(network, [int(interval.kind == kind) for interval in network.intervals])
    chain.run()
    return max(chain.at_end)


class _Chain:
    """The largest weight that can be gathered up to every start and every end."""

    def __init__(self, network: Network, weights: Sequence[int]) -> None:
        num = len(network.intervals)
        self._network = network
        self._weights = weights
        self.at_start = [0] * num
        self.at_end = [0] * num
        self._start_from: list[Arc | None] = [None] * num
        self._end_from: list[Arc | None] = [None] * num

    def run(self) -> None:
        num = len(self._network.intervals)
        for event in self._network.order:
            if event >= num:
                index = event - num
                arc = max(self._network.end_arcs[index], key=self._gathered)
                if self._gathered(arc) > self.at_start[index]:
                    self._end_from[index] = arc
                self.at_end[index] = max(self.at_start[index], self._gathered(arc))
                continue
            if self._network.start_arcs[event]:
                arc = max(self._network.start_arcs[event], key=self._gathered)
                self._start_from[event] = arc
                self.at_start[event] = self._gathered(arc)
            self.at_end[event] = self.at_start[event] + self._weights[event]

    def longest(self) -> list[int]:
        """Indices along a longest chain, first to last."""
        index: int | None = max(range(len(self.at_end)), key=lambda i: self.at_end[i])
        at_end = True
        chain: list[int] = []
        while index is not None:
            chain.append(index)
            arc = (self._end_from[index] if at_end else None) or self._start_from[index]
            index = arc.source if arc else None
            at_end = arc is not None and arc.inside_ns == END
        return chain[::-1]

    def _gathered(self, arc: Arc) -> int:
        source, weight = arc.source, self._weights[arc.source]
        duration_ns = self._network.recorded.duration_ns(source) or 1
        if arc.inside_ns == END:
            return self.at_end[source] - min(arc.early_ns, duration_ns) * weight // duration_ns
        return self.at_start[source] + arc.inside_ns * weight // duration_ns
