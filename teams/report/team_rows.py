"""From a run's event log and transcript to its report."""

from collections.abc import Sequence
from typing import Protocol

from protocol.events import EdgeKind, Interval, IntervalKind
from teams.attribution import Attribution, Share
from teams.critical_path import NS_PER_S, Path
from teams.dag import Dag
from teams.events import EventLog
from teams.report.model import (
    AttributionTables,
    EdgeRow,
    IntervalRow,
    SegmentRow,
    ShareRow,
    TeamFigures,
    TeamReport,
    TurnRow,
    WhatIfRow,
)
from teams.whatif import Scale

_KINDS_TO_SPEED_UP: tuple[IntervalKind, ...] = (
    "model.queue",
    "model.prefill",
    "model.transfer",
    "model.decode",
    "tool.queue",
    "tool.run",
    "sandbox.create",
    "verify",
    "harness",
)


class RecordedTurn(Protocol):
    """What the report needs of a turn; times on the same clock as the event log."""

    @property
    def agent(self) -> str: ...
    @property
    def number(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def action(self) -> str: ...
    @property
    def observation(self) -> str: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...
    @property
    def start_ns(self) -> int: ...
    @property
    def end_ns(self) -> int: ...


def team_report(
    log: EventLog,
    *,
    task: str,
    replay: bool,
    solved: bool,
    divergence: str = "",
    verdict: str = "",
    turns: Sequence[RecordedTurn] = (),
    final: str | None = None,
) -> TeamReport:
    """The report of one finished run; `divergence` non-empty means that it diverged.

    `final`: see `Dag`. Edges that cannot be true are left out of the analysis and listed in `problems`.
    """
    dag = Dag(log, strict=False, final=final)
    path, origin_ns = dag.critical_path(), dag.network.origin_ns
    return TeamReport(
        task=task,
        replay=replay,
        solved=solved,
        diverged=bool(divergence),
        verdict=verdict,
        divergence=divergence,
        agents=dag.agents,
        agents_on_path=path.agents,
        edge_kinds_on_path=tuple(sorted(path.edge_kinds)),
        makespan_s=path.makespan_s,
        critical_path_s=path.length_s,
        segments=_segments(path, origin_ns),
        attribution=_tables(dag.attribution()),
        intervals=_intervals(dag, path, origin_ns),
        edges=_edges(dag, path),
        figures=_figures(dag),
        what_if=_what_if(dag),
        transcript=tuple(_turn(turn, origin_ns) for turn in turns),
        problems=tuple(str(problem) for problem in dag.problems),
    )


def _seconds(time_ns: int, origin_ns: int) -> float:
    return (time_ns - origin_ns) / NS_PER_S


def _segments(path: Path, origin_ns: int) -> tuple[SegmentRow, ...]:
    left_at: dict[int, EdgeKind] = {crossing.time_ns: crossing.edge.kind for crossing in path.crossings}
    return tuple(
        SegmentRow(
            kind=segment.kind,
            agent=segment.agent,
            name=segment.name,
            start_s=_seconds(segment.start_ns, origin_ns),
            end_s=_seconds(segment.end_ns, origin_ns),
            duration_s=segment.duration_ns / NS_PER_S,
            interval=segment.interval,
            reached_by=left_at.get(segment.start_ns),
        )
        for segment in path.segments
    )


def _tables(found: Attribution) -> AttributionTables:
    return AttributionTables(
        by_kind=_shares(found.by_kind),
        by_agent=_shares(found.by_agent),
        by_phase=_shares(found.by_phase),
        untraced_share=found.untraced_share,
        harness_share=found.harness_share,
        harness_gap_share=found.harness_gap_share,
        coordination_share=found.coordination_share,
    )


def _shares(shares: Sequence[Share]) -> tuple[ShareRow, ...]:
    return tuple(ShareRow(key=s.key, seconds=s.seconds, percent=s.percent) for s in shares)


def _intervals(dag: Dag, path: Path, origin_ns: int) -> tuple[IntervalRow, ...]:
    slack, on_path, wasted = dag.slack(), path.intervals, frozenset(dag.wasted().intervals)

    def row(interval: Interval) -> IntervalRow:
        return IntervalRow(
            id=interval.id,
            agent=interval.agent,
            kind=interval.kind,
            name=interval.name,
            start_s=_seconds(interval.start_ns, origin_ns),
            end_s=_seconds(interval.end_ns, origin_ns),
            slack_s=slack[interval.id],
            on_path=interval.id in on_path,
            wasted=interval.id in wasted,
            attributes=interval.attributes,
        )

    return tuple(row(interval) for interval in sorted(dag.intervals, key=lambda i: (i.start_ns, i.end_ns)))


def _edges(dag: Dag, path: Path) -> tuple[EdgeRow, ...]:
    crossed = {crossing.edge for crossing in path.crossings}
    return tuple(
        EdgeRow(kind=edge.kind, source=edge.source, target=edge.target, on_path=edge in crossed)
        for edge in dag.edges
    )


def _figures(dag: Dag) -> TeamFigures:
    found = dag.statistics()
    return TeamFigures(
        parallelism=found.parallelism,
        structural_s=found.structural_s,
        work_s=found.work_s,
        peak_concurrency=found.peak_concurrency,
        average_concurrency=found.average_concurrency,
        serial_share=found.serial_share,
        critical_steps=found.critical_steps,
        steps=found.steps,
        wasted_s=found.wasted_s,
    )


def _what_if(dag: Dag) -> tuple[WhatIfRow, ...]:
    """Every kind twice as fast, the greatest saving first; those that save under 0.5% are left out."""
    rows: list[WhatIfRow] = []
    for kind in _KINDS_TO_SPEED_UP:
        found = dag.what_if(Scale(0.5, kind=kind))
        if found.saved_s > 0.005 * dag.makespan_s:
            rows.append(
                WhatIfRow(
                    change=f"{kind} in half the time", makespan_s=found.makespan_s, saved_s=found.saved_s
                )
            )
    return tuple(sorted(rows, key=lambda row: -row.saved_s))


def _turn(turn: RecordedTurn, origin_ns: int) -> TurnRow:
    return TurnRow(
        agent=turn.agent,
        number=turn.number,
        text=turn.text,
        action=turn.action,
        observation=turn.observation,
        prompt_tokens=turn.prompt_tokens,
        completion_tokens=turn.completion_tokens,
        start_s=_seconds(turn.start_ns, origin_ns),
        end_s=_seconds(turn.end_ns, origin_ns),
    )
