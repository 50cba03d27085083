"""The critical path of a run: the chain of activity and delay that its makespan consists of.

A backward walk from the last end. In an interval it goes to the interval's start, and from there to the last
of what that start waited for; in a wait it crosses to the source that ended last. Every nanosecond of the
makespan falls into exactly one segment, so the segments sum to it exactly.
"""

from dataclasses import dataclass
from typing import Literal

from protocol.events import Edge, EdgeKind, IntervalKind
from teams.dag_network import END, PROGRAM_ORDER, Arc, Network, Times

SegmentKind = Literal[IntervalKind, "handoff", "untraced"]
"""An interval's kind; `handoff`: from the end of what was waited for to the moment the waiter went on;
`untraced`: time with no known predecessor. A gap between two intervals of one agent is `harness`."""

NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Segment:
    """One stretch of the path. `interval` is the id of the interval that it lies in; empty in a gap."""

    kind: SegmentKind
    agent: str
    name: str
    start_ns: int
    end_ns: int
    interval: str = ""

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns

    @property
    def is_harness_gap(self) -> bool:
        """Time of an agent in which no interval was recorded."""
        return self.kind == "harness" and not self.interval


@dataclass(frozen=True, slots=True)
class Crossing:
    """The path goes from one interval to another over `edge`, leaving its source at `time_ns`."""

    edge: Edge
    time_ns: int


@dataclass(frozen=True, slots=True)
class Path:
    """Segments and crossings in order of time. `sum(segment.duration_ns) == makespan_ns`, always."""

    segments: tuple[Segment, ...]
    crossings: tuple[Crossing, ...]
    makespan_ns: int

    @property
    def makespan_s(self) -> float:
        """From the first start to the last end, in seconds."""
        return self.makespan_ns / NS_PER_S

    @property
    def length_s(self) -> float:
        """The sum of the segments, in seconds: equal to the makespan by construction."""
        return sum(segment.duration_ns for segment in self.segments) / NS_PER_S

    @property
    def agents(self) -> tuple[str, ...]:
        """The agents on the path, in the order in which it first meets them."""
        return tuple(dict.fromkeys(segment.agent for segment in self.segments))

    @property
    def edge_kinds(self) -> frozenset[EdgeKind]:
        """The kinds of edges that the path crosses."""
        return frozenset(crossing.edge.kind for crossing in self.crossings)

    @property
    def intervals(self) -> frozenset[str]:
        """Ids of the intervals that hold a part of the path."""
        return frozenset(segment.interval for segment in self.segments if segment.interval)


def walk(network: Network, times: Times) -> Path:
    """The critical path at the given times: the recorded ones, or those of a what-if."""
    walker = _Walker(network, times)
    walker.run()
    walker.segments.reverse()
    walker.crossings.reverse()
    return Path(tuple(walker.segments), tuple(walker.crossings), network.makespan_ns(times))


class _Walker:
    def __init__(self, network: Network, times: Times) -> None:
        self._network = network
        self._times = times
        self._now_ns = 0
        self.segments: list[Segment] = []
        self.crossings: list[Crossing] = []

    def run(self) -> None:
        index: int | None = self._network.final(self._times)
        self._now_ns = self._times.end_ns[index]
        at_end = True
        while index is not None:
            arc = self._wait_source(index) if at_end else None
            if arc is None:
                self._activity(index, at_end=at_end)
                arc = self._predecessor(index)
            index = arc.source if arc else None
            at_end = arc is not None and arc.inside_ns == END

    def _wait_source(self, index: int) -> Arc | None:
        """Cross a held wait, if it was its source that ended it and not its own late start."""
        arcs = self._network.end_arcs[index]
        if not arcs:
            return None
        arc = self._times.binding(arcs)
        if self._times.point(arc) <= self._times.start_ns[index]:
            return None
        self._follow(index, arc, wait=self._network.intervals[index].id)
        return arc

    def _activity(self, index: int, *, at_end: bool) -> None:
        interval = self._network.intervals[index]
        self._emit(
            self._kind(index, at_end=at_end), index, self._times.start_ns[index], interval.id, interval.name
        )

    def _kind(self, index: int, *, at_end: bool) -> SegmentKind:
        kind = self._network.intervals[index].kind
        if kind != "wait" or not at_end:
            return kind
        return "handoff" if index in self._network.answered else "untraced"

    def _predecessor(self, index: int) -> Arc | None:
        arcs = self._network.start_arcs[index]
        if not arcs:
            self._emit("untraced", index, self._network.origin_ns, "", "before the agent's first interval")
            return None
        arc = self._times.binding(arcs)
        self._follow(index, arc)
        return arc

    def _follow(self, index: int, arc: Arc, wait: str = "") -> None:
        point_ns = min(self._now_ns, self._times.point(arc))
        if arc.edge == PROGRAM_ORDER:
            self._emit("harness", index, point_ns, "", "gap")
            return
        edge = self._network.edges[arc.edge]
        self._emit("handoff", index, point_ns, wait, edge.kind)
        self.crossings.append(Crossing(edge, point_ns))

    def _emit(self, kind: SegmentKind, index: int, start_ns: int, interval: str, name: str) -> None:
        """A segment from `start_ns` to the current time, which becomes `start_ns`; none where it is empty."""
        if start_ns < self._now_ns:
            agent = self._network.intervals[index].agent
            self.segments.append(Segment(kind, agent, name, start_ns, self._now_ns, interval))
            self._now_ns = start_ns
