"""From a log to its dependency network.

Three rules decide what depends on what:
- A start waits for the agent's own earlier intervals that nothing has followed yet, and for the edges into
  the interval. The delay after the last of them is the interval's lag.
- A wait ends after the sources of its edges: of those that ended while it lasted, all count. One that ran on
  beyond the wait's end counts, up to that moment, only where no other explains the wait.
- Other intervals do not wait in their middle: an edge that arrives there is loose. It shows that the
  source's work was used, and moves nothing.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from protocol.errors import InvalidInput
from protocol.events import Edge, Interval
from teams.dag_network import END, PROGRAM_ORDER, Arc, Network, Times


class Problem(NamedTuple):
    """An edge that cannot be true. A strict analysis refuses the log, a lenient one leaves the edge out."""

    kind: Literal["unknown id", "effect before cause", "cycle"]
    edge: Edge
    detail: str

    def __str__(self) -> str:
        return (
            f"{self.kind}: {self.edge.kind} edge {self.edge.source!r} -> {self.edge.target!r}: {self.detail}"
        )


@dataclass(slots=True)
class NetworkBuilder:
    """Builds one network; `problems` holds the edges that it left out."""

    intervals: Sequence[Interval]
    tolerance_ns: int
    fixed_final: int | None = None
    problems: list[Problem] = field(default_factory=list[Problem])

    def build(self, edges: Iterable[Edge]) -> Network:
        """The network of these intervals and edges; edges that cannot be true become problems."""
        kept = self._causal(edges)
        network = self._assemble(kept)
        if len(network.order) < _num_events(network):
            in_cycle = self._edges_in_cycles(network)
            network = self._assemble([edge for edge in kept if edge not in in_cycle])
        return network

    def _causal(self, edges: Iterable[Edge]) -> list[Edge]:
        by_id = {interval.id: interval for interval in self.intervals}
        kept: list[Edge] = []
        for edge in edges:
            source, target = by_id.get(edge.source), by_id.get(edge.target)
            if source is None or target is None:
                missing = edge.source if source is None else edge.target
                self._leave_out("unknown id", edge, f"no interval {missing!r} in the log")
            elif source.start_ns > target.end_ns + self.tolerance_ns:
                late_ns = source.start_ns - target.end_ns
                self._leave_out(
                    "effect before cause", edge, f"the source starts {late_ns} ns after the target ended"
                )
            else:
                kept.append(edge)
        return kept

    def _edges_in_cycles(self, network: Network) -> set[Edge]:
        stuck = _on_cycles(network)
        found: set[Edge] = set()
        for target in sorted(stuck):
            for arc in (*network.start_arcs[target], *network.end_arcs[target]):
                if arc.edge != PROGRAM_ORDER and arc.source in stuck:
                    edge = network.edges[arc.edge]
                    found.add(edge)
                    self._leave_out("cycle", edge, "by other edges, its target comes before its source")
        return found

    def _leave_out(
        self, kind: Literal["unknown id", "effect before cause", "cycle"], edge: Edge, detail: str
    ) -> None:
        self.problems.append(Problem(kind, edge, detail))

    def _assemble(self, edges: Sequence[Edge]) -> Network:
        times = Times([i.start_ns for i in self.intervals], [i.end_ns for i in self.intervals])
        # Most intervals have no arc of most sorts: they share one empty tuple.
        start_arcs = self._program_arcs(times)
        end_arcs: list[Sequence[Arc]] = [()] * len(self.intervals)
        loose: list[Sequence[int]] = [()] * len(self.intervals)
        incoming = self._incoming(edges)
        for target, sources in incoming.items():
            sorting = _EdgeSorting(self.intervals, edges, times, self.tolerance_ns, target)
            sorting.sort(sources, has_program_arc=bool(start_arcs[target]))
            start_arcs[target] = (*start_arcs[target], *sorting.into_start)
            end_arcs[target] = with_lag(sorting.into_end, times.end_ns[target], times, times.start_ns[target])
            loose[target] = sorting.loose
        answered = frozenset(t for t in incoming if any(edges[e].kind != "spawn" for _, e in incoming[t]))
        for index, start_ns in enumerate(times.start_ns):
            start_arcs[index] = with_lag(start_arcs[index], start_ns, times)
        for arcs_in in (start_arcs, end_arcs):
            for index in [i for i, arcs in enumerate(arcs_in) for arc in arcs if arc.scale_ns]:
                arcs_in[index] = _without_scale(arcs_in[index], end_arcs)
        return Network(
            self.intervals, edges, times, start_arcs, end_arcs, loose, answered,
            min(times.start_ns), self.fixed_final, topological_order(start_arcs, end_arcs),
        )  # fmt: skip

    def _incoming(self, edges: Sequence[Edge]) -> dict[int, list[tuple[int, int]]]:
        """By target: (source, number of the edge)."""
        index_of = {interval.id: index for index, interval in enumerate(self.intervals)}
        incoming: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for number, edge in enumerate(edges):
            incoming[index_of[edge.target]].append((index_of[edge.source], number))
        return incoming

    def _program_arcs(self, times: Times) -> list[Sequence[Arc]]:
        by_agent: defaultdict[str, list[int]] = defaultdict(list)
        for index, interval in enumerate(self.intervals):
            by_agent[interval.agent].append(index)
        arcs: list[Sequence[Arc]] = [()] * len(self.intervals)
        for indices in by_agent.values():
            indices.sort(key=lambda i: (times.start_ns[i], times.end_ns[i], i))
            add_program_order(arcs, indices, times, self.tolerance_ns)
        return arcs


@dataclass(slots=True)
class _EdgeSorting:
    """Sorts the edges into one interval: into its start, into its end, or loose."""

    intervals: Sequence[Interval]
    edges: Sequence[Edge]
    times: Times
    tolerance_ns: int
    target: int
    into_start: list[Arc] = field(default_factory=list[Arc])
    into_end: list[Arc] = field(default_factory=list[Arc])
    loose: list[int] = field(default_factory=list[int])

    def sort(self, sources: Sequence[tuple[int, int]], *, has_program_arc: bool) -> None:
        start, end = self.times.start_ns[self.target], self.times.end_ns[self.target]
        is_wait = self.intervals[self.target].kind == "wait"
        running: list[tuple[int, int]] = []  # still running when the target went on
        for source, edge in sources:
            source_end = self.times.end_ns[source]
            may_hold = is_wait and self.edges[edge].kind != "spawn"
            if source_end <= start + (0 if may_hold else self.tolerance_ns):
                self.into_start.append(end_arc(source, start, self.times, edge))
            elif may_hold and source_end <= end + self.tolerance_ns:
                self.into_end.append(end_arc(source, end, self.times, edge))
            else:
                running.append((source, edge))
        may_start = not (has_program_arc or self.into_start)
        may_end = is_wait and not self.into_end
        for source, edge in running:
            self._sort_running(source, edge, may_start=may_start, may_end=may_end)

    def _sort_running(self, source: int, edge: int, *, may_start: bool, may_end: bool) -> None:
        start, end = self.times.start_ns[self.target], self.times.end_ns[self.target]
        is_spawn = self.edges[edge].kind == "spawn"
        if is_spawn and may_start and self.times.start_ns[source] <= start + self.tolerance_ns:
            self.into_start.append(inside_arc(source, start, self.times, edge))
        elif not is_spawn and may_end:
            self.into_end.append(inside_arc(source, end, self.times, edge))
        else:
            self.loose.append(source)


def add_program_order(
    arcs: list[Sequence[Arc]], indices: Sequence[int], times: Times, tolerance_ns: int
) -> None:
    """Add to `arcs` those between one agent's intervals; `indices` are sorted by start.

    Intervals that overlap by no more than the tolerance follow each other. Others ran at the same time, and
    what comes after them waits for all of them.
    """
    start, end = times.start_ns, times.end_ns
    running: list[tuple[int, int]] = []  # heap of (end, position)
    ended: list[int] = []  # positions that nothing is known to have followed
    for position, index in enumerate(indices):
        now = start[index]
        while running and running[0][0] <= now + tolerance_ns:
            ended.append(heapq.heappop(running)[1])
        if len(ended) > 1:
            latest = max(ended)
            horizon = start[indices[latest]] + tolerance_ns
            ended = [p for p in ended if p == latest or end[indices[p]] > horizon]
        if ended:
            arcs[index] = tuple([end_arc(indices[p], now, times, PROGRAM_ORDER) for p in ended])
        elif position:
            arcs[index] = (inside_arc(indices[position - 1], now, times, PROGRAM_ORDER),)
        heapq.heappush(running, (end[index], position))


def end_arc(source: int, now_ns: int, times: Times, edge: int) -> Arc:
    """An arc from the end of `source` to an event at `now_ns`, as yet without its lag."""
    return Arc(source, edge, early_ns=max(0, times.end_ns[source] - now_ns))


def inside_arc(source: int, now_ns: int, times: Times, edge: int) -> Arc:
    """An arc from the point inside of `source` at which the event at `now_ns` took place."""
    start, end = times.start_ns[source], times.end_ns[source]
    if end == start:
        return end_arc(source, now_ns, times, edge)
    return Arc(source, edge, inside_ns=min(max(0, now_ns - start), end - start), scale_ns=end - start)


def with_lag(
    arcs: Sequence[Arc], now_ns: int, times: Times, not_before_ns: int | None = None
) -> Sequence[Arc]:
    """The same arcs with the delay from the last of their points (and `not_before_ns`) to `now_ns`."""
    if not arcs:
        return ()
    last_ns = max([times.point(arc) for arc in arcs])
    if not_before_ns is not None:
        last_ns = max(last_ns, not_before_ns)
    lag_ns = now_ns - last_ns
    return tuple([arc._replace(lag_ns=lag_ns) for arc in arcs]) if lag_ns else arcs


def topological_order(start_arcs: Sequence[Sequence[Arc]], end_arcs: Sequence[Sequence[Arc]]) -> list[int]:
    """Events in an order in which every arc points forward; events on or behind a cycle are missing."""
    num = len(start_arcs)
    followers = _Followers(2 * num)
    missing = [len(arcs) for arcs in start_arcs] + [0] * num
    for index in range(num):
        for arc in start_arcs[index]:
            followers.add(_event(arc, end_arcs, num), index)
        if end_arcs[index]:
            followers.add(index, num + index)
            missing[num + index] = 1 + len(end_arcs[index])
            for arc in end_arcs[index]:
                followers.add(_event(arc, end_arcs, num), num + index)
    order = [index for index in range(num) if missing[index] == 0]
    for event in order:
        for follower in followers.of(event):
            missing[follower] -= 1
            if missing[follower] == 0:
                order.append(follower)
    return order


class _Followers:
    """Event lists as two chains of integers: a list object for each event costs a second per 100k."""

    def __init__(self, num_events: int) -> None:
        self._head = [-1] * num_events
        self._event: list[int] = []
        self._next: list[int] = []

    def add(self, event: int, follower: int) -> None:
        self._next.append(self._head[event])
        self._head[event] = len(self._event)
        self._event.append(follower)

    def of(self, event: int) -> Iterable[int]:
        link = self._head[event]
        while link >= 0:
            yield self._event[link]
            link = self._next[link]


def refuse(problems: Sequence[Problem]) -> None:
    """Raise InvalidInput where there are problems; the message names the first."""
    if problems:
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise InvalidInput(
            f"event log: {problems[0]}{more}", hint="strict=False leaves such edges out and lists them"
        )


def _event(arc: Arc, end_arcs: Sequence[Sequence[Arc]], num: int) -> int:
    """The event that must be known before the arc's point is."""
    return num + arc.source if arc.inside_ns == END and end_arcs[arc.source] else arc.source


def _without_scale(arcs: Sequence[Arc], end_arcs: Sequence[Sequence[Arc]]) -> Sequence[Arc]:
    # A held wait has no length of its own: a point inside of it keeps its distance from the wait's start.
    # Otherwise the wait's end would be needed for what, in turn, may end the wait.
    return tuple([arc._replace(scale_ns=0) if end_arcs[arc.source] else arc for arc in arcs])


def _on_cycles(network: Network) -> set[int]:
    """Intervals on a cycle or between two: what no order reaches from the front nor from the back."""
    num = len(network.intervals)
    known = set(network.order)
    stuck = {i for i in range(num) if i not in known or (network.is_held(i) and num + i not in known)}
    while stuck:
        used = {s for i in stuck for s in network.arc_sources(i) if s in stuck}
        if used == stuck:
            break
        stuck = used
    return stuck


def _num_events(network: Network) -> int:
    return len(network.intervals) + sum(1 for arcs in network.end_arcs if arcs)
