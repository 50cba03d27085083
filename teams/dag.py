"""The DAG of one team run: the one place to ask where its time went."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from protocol.errors import InvalidInput
from protocol.events import Edge, Interval
from teams.attribution import Attribution, attribute
from teams.critical_path import NS_PER_S, Path, walk
from teams.dag_builder import NetworkBuilder, Problem, refuse
from teams.dag_network import Network
from teams.dag_usage import Wasted, concurrency, is_work, wasted
from teams.events import EventLog
from teams.path_slack import slack_ns
from teams.path_structural import StructuralPath, critical_steps, structural_path
from teams.whatif import Change, WhatIf, what_if

TOLERANCE_NS = 1_000_000
"""Overlap up to which one interval still follows another: two processes stamp one moment this much apart."""


@dataclass(frozen=True, slots=True)
class DagStatistics:
    """The run in figures; seconds, counts and shares (0..1) of the makespan."""

    agents: int
    intervals: int
    edges: int
    makespan_s: float
    work_s: float
    structural_s: float
    parallelism: float
    peak_concurrency: int
    average_concurrency: float
    serial_share: float
    coordination_share: float
    critical_steps: int
    steps: int
    wasted_s: float


class Dag:
    """A finished run, or a snapshot of a running one. Reads the log once; never blocks, never changes.

    `strict`: raise InvalidInput for an edge that cannot be true (an unknown id, an effect before its cause, a
    cycle). Otherwise it is left out and listed in `problems`. Intervals without an end are closed at the
    log's last time either way.
    `final`: id of the interval whose end is the end of the run. What goes on after it is cut off, such as
    teammates that outlive the answer. By default the run ends with its last interval.
    """

    def __init__(
        self,
        log: EventLog,
        *,
        strict: bool = True,
        tolerance_ns: int = TOLERANCE_NS,
        final: str | None = None,
    ) -> None:
        intervals = (*log.intervals, *log.unfinished)
        edges = log.edges
        if final is not None:
            intervals, edges = _cut(intervals, edges, final)
        if not intervals:
            raise InvalidInput(
                f"event log of {log.run_id}: no interval", hint="nothing was recorded in this run"
            )
        fixed_final = next((i for i, interval in enumerate(intervals) if interval.id == final), None)
        builder = NetworkBuilder(intervals, tolerance_ns, fixed_final)
        self._network = builder.build(edges)
        self.problems: tuple[Problem, ...] = tuple(builder.problems)
        if strict:
            refuse(self.problems)

    @property
    def network(self) -> Network:
        """The dependency network that every answer comes from."""
        return self._network

    @property
    def intervals(self) -> Sequence[Interval]:
        return self._network.intervals

    @property
    def edges(self) -> Sequence[Edge]:
        """The edges that were kept."""
        return self._network.edges

    @property
    def agents(self) -> tuple[str, ...]:
        """Agents in the order of their first start."""
        return tuple(dict.fromkeys(i.agent for i in sorted(self.intervals, key=lambda i: i.start_ns)))

    @property
    def makespan_s(self) -> float:
        """From the first start to the last end."""
        return self._network.makespan_ns(self._network.recorded) / NS_PER_S

    def critical_path(self) -> Path:
        """What the makespan consists of; the segments sum to it exactly."""
        return self._path

    def slack(self) -> dict[str, float]:
        """Seconds by which each interval may grow before the makespan does, by id; 0.0 on the path."""
        return {
            interval.id: slack / NS_PER_S
            for interval, slack in zip(self.intervals, slack_ns(self._network), strict=True)
        }

    def structural_path(self) -> StructuralPath:
        """The longest chain of work without waits and delays."""
        return structural_path(self._network)

    def attribution(self) -> Attribution:
        """Shares of the critical path by kind, agent and phase."""
        return attribute(self._path)

    def what_if(self, *changes: Change) -> WhatIf:
        """The run recomputed with durations scaled (`Scale`) or seconds added (`Add`)."""
        return what_if(self._network, changes)

    def wasted(self) -> Wasted:
        """Work that the end of the run did not need."""
        return wasted(self._network)

    def statistics(self) -> DagStatistics:
        """The run in figures."""
        structural, used = self.structural_path(), concurrency(self._network)
        return DagStatistics(
            agents=len(self.agents),
            intervals=len(self.intervals),
            edges=len(self.edges),
            makespan_s=self.makespan_s,
            work_s=sum(i.end_ns - i.start_ns for i in self.intervals if is_work(i)) / NS_PER_S,
            structural_s=structural.length_s,
            parallelism=structural.parallelism,
            peak_concurrency=used.peak,
            average_concurrency=used.average,
            serial_share=used.serial_share,
            coordination_share=self.attribution().coordination_share,
            critical_steps=critical_steps(self._network),
            steps=sum(interval.kind == "model.decode" for interval in self.intervals),
            wasted_s=self.wasted().work_s,
        )

    @cached_property
    def _path(self) -> Path:
        return walk(self._network, self._network.recorded)


def _cut(
    intervals: Sequence[Interval], edges: Sequence[Edge], final: str
) -> tuple[tuple[Interval, ...], tuple[Edge, ...]]:
    """Leave out what starts after the end of `final`, and shorten what outlives it."""
    end_ns = next((interval.end_ns for interval in intervals if interval.id == final), None)
    if end_ns is None:
        raise InvalidInput(f"final interval {final!r} is not in the log")
    late = {i.id for i in intervals if i.start_ns >= end_ns and i.id != final}
    kept = tuple(replace(i, end_ns=min(i.end_ns, end_ns)) for i in intervals if i.id not in late)
    return kept, tuple(edge for edge in edges if edge.source not in late and edge.target not in late)
