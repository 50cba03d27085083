"""The dependency network of a run: which interval's start or end waited for which other interval.

Every analysis (critical path, slack, what-if, structural path) reads this one network, so they cannot
disagree about what depends on what. It holds arcs into the start of each interval and, for a wait, into its
end. An arc leaves its source's end, or a point inside of it where the source still ran when the target went
on (a spawning call that outlives the child's first step). `dag_builder` makes it from a log.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from protocol.events import Edge, Interval, IntervalKind

PROGRAM_ORDER = -1
END = -1
WAITS: frozenset[IntervalKind] = frozenset({"wait", "tool.queue"})
"""Kinds without work of their own: an edge may end one. A queue that no edge explains stays a queue."""


class Arc(NamedTuple):
    """`event >= point(source) + lag_ns`, where the event is the start or the end of the target."""

    source: int
    edge: int  # index into Network.edges, or PROGRAM_ORDER
    inside_ns: int = END  # distance of the point from the source's start; END: the source's end
    scale_ns: int = 0  # duration that inside_ns is a share of; 0: it stays where it is
    early_ns: int = 0  # how far before the source's end the target went on: clock tolerance
    lag_ns: int = 0


@dataclass(frozen=True, slots=True)
class Times:
    """Start and end of every interval, in nanoseconds: the recorded ones, or those of a what-if."""

    start_ns: list[int]
    end_ns: list[int]

    def point(self, arc: Arc) -> int:
        """The time at which the arc leaves its source."""
        source = arc.source
        start = self.start_ns[source]
        if arc.inside_ns == END:
            return max(start, self.end_ns[source] - arc.early_ns)
        if arc.scale_ns == 0:
            return start + arc.inside_ns
        return start + arc.inside_ns * (self.end_ns[source] - start) // arc.scale_ns

    def duration_ns(self, index: int) -> int:
        return self.end_ns[index] - self.start_ns[index]

    def binding(self, arcs: Sequence[Arc]) -> Arc:
        """The arc whose point lies last; program order wins a tie, then the first."""
        return max(arcs, key=lambda arc: (self.point(arc), arc.edge == PROGRAM_ORDER))


@dataclass(frozen=True, slots=True)
class Network:
    """Intervals by index, the arcs between them, and an order in which every arc points forward.

    `order` lists events: `i` is the start of interval i (and its end, unless it is held), `n + i` the end of
    the held wait i.
    """

    intervals: Sequence[Interval]
    edges: Sequence[Edge]
    recorded: Times
    start_arcs: Sequence[Sequence[Arc]]
    end_arcs: Sequence[Sequence[Arc]]
    loose: Sequence[Sequence[int]]  # sources of edges that arrive in mid-interval and move nothing
    answered: frozenset[int]  # waits and queues that some edge explains
    origin_ns: int
    fixed_final: int | None  # the interval whose end is the run's, where the caller named one
    order: Sequence[int]

    def is_held(self, index: int) -> bool:
        """Whether the interval is a wait that ends when other intervals do."""
        return bool(self.end_arcs[index])

    def final(self, times: Times) -> int:
        """The interval whose end is the end of the run."""
        if self.fixed_final is not None:
            return self.fixed_final
        return max(range(len(self.intervals)), key=lambda i: (times.end_ns[i], times.start_ns[i], i))

    def makespan_ns(self, times: Times) -> int:
        """From the first start to the end of the run."""
        return times.end_ns[self.final(times)] - self.origin_ns

    def arc_sources(self, index: int) -> Iterable[int]:
        """The intervals that this one waited for."""
        yield from (arc.source for arc in self.start_arcs[index])
        yield from (arc.source for arc in self.end_arcs[index])

    def sources(self, index: int) -> Iterable[int]:
        """Every interval whose work this one used: those that it waited for, and loose edges."""
        yield from self.arc_sources(index)
        yield from self.loose[index]
