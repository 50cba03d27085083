"""From a log to its dependency network.

Three rules decide what depends on what:
- A start waits for the agent's own earlier intervals that nothing has followed yet, and for the edges into
  the interval. The delay after the last of them is the interval's lag.
- A wait, or a queue for a box, ends after the sources of its edges: of those that ended while it lasted, all
  count. One that ran on beyond its end counts, up to that moment, only where no other explains it.
- Other intervals do not wait in their middle: an edge that arrives there is loose. It shows that the
  source's work was used, and moves nothing.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from protocol.errors import InvalidInput
from protocol.events import Edge, Interval
from teams.dag_arcs import add_program_order, end_arc, inside_arc, with_lag, without_scale
from teams.dag_network import PROGRAM_ORDER, WAITS, Arc, Network, Times
from teams.dag_order import on_cycles, topological_order


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
    _index: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self._index = {interval.id: index for index, interval in enumerate(self.intervals)}

    def build(self, edges: Iterable[Edge]) -> Network:
        """The network of these intervals and edges; edges that cannot be true become problems."""
        kept = self._causal(edges)
        network = self._assemble(kept)
        # Without the edges of a cycle, one that was loose may come to hold a wait, and close another cycle.
        while stuck := on_cycles(network):
            in_cycle = self._edges_in_cycle(network, stuck)
            kept = [edge for edge in kept if edge not in in_cycle]
            network = self._assemble(kept)
        return network

    def _causal(self, edges: Iterable[Edge]) -> list[Edge]:
        kept: list[Edge] = []
        for edge in edges:
            source, target = self._index.get(edge.source), self._index.get(edge.target)
            if source is None or target is None:
                missing = edge.source if source is None else edge.target
                self._leave_out("unknown id", edge, f"no interval {missing!r} in the log")
                continue
            late_ns = self.intervals[source].start_ns - self.intervals[target].end_ns
            if late_ns > self.tolerance_ns:
                detail = f"the source starts {late_ns} ns after the target ended"
                self._leave_out("effect before cause", edge, detail)
            else:
                kept.append(edge)
        return kept

    def _edges_in_cycle(self, network: Network, stuck: set[int]) -> set[Edge]:
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
            if sorting.into_start:
                joined = (*start_arcs[target], *sorting.into_start)
                start_arcs[target] = with_lag(joined, times.start_ns[target], times)
            end_arcs[target] = with_lag(sorting.into_end, times.end_ns[target], times, times.start_ns[target])
            loose[target] = sorting.loose
        answered = frozenset(t for t in incoming if any(edges[e].kind != "spawn" for _, e in incoming[t]))
        for arcs_in in (start_arcs, end_arcs):
            for index in [i for i, arcs in enumerate(arcs_in) for arc in arcs if arc.scale_ns]:
                arcs_in[index] = without_scale(arcs_in[index], end_arcs)
        return Network(
            self.intervals, edges, times, start_arcs, end_arcs, loose, answered,
            min(times.start_ns), self.fixed_final, topological_order(start_arcs, end_arcs),
        )  # fmt: skip

    def _incoming(self, edges: Sequence[Edge]) -> dict[int, list[tuple[int, int]]]:
        """By target: (source, number of the edge)."""
        incoming: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for number, edge in enumerate(edges):
            incoming[self._index[edge.target]].append((self._index[edge.source], number))
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
        is_wait = self.intervals[self.target].kind in WAITS
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


def refuse(problems: Sequence[Problem]) -> None:
    """Raise InvalidInput where there are problems; the message names the first."""
    if problems:
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise InvalidInput(
            f"event log: {problems[0]}{more}", hint="strict=False leaves such edges out and lists them"
        )
