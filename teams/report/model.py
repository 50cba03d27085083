"""What a report says, as values: frozen, free of layout, and JSON as they are.

Times are seconds from the start of the team's run. The renderers add nothing to these values but layout.
"""

from typing import Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from protocol.events import EdgeKind, IntervalKind, Scalar
from teams.critical_path import SegmentKind


class ReportValue(BaseModel):
    """Unknown fields are errors; values are never changed."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SegmentRow(ReportValue):
    """One stretch of the critical path. `interval` is empty in a gap or a handoff between intervals."""

    kind: SegmentKind
    agent: str
    name: str
    start_s: float
    end_s: float
    duration_s: float
    interval: str = ""
    reached_by: EdgeKind | None = None  # the edge over which the path comes to this segment


class ShareRow(ReportValue):
    """A part of the critical path; the `percent` of a table sum to 100."""

    key: str
    seconds: float
    percent: float


class AttributionTables(ReportValue):
    """Where the time of the path went. Shares are 0..1 of the makespan."""

    by_kind: tuple[ShareRow, ...]
    by_agent: tuple[ShareRow, ...]
    by_phase: tuple[ShareRow, ...]
    untraced_share: float
    harness_share: float
    harness_gap_share: float
    coordination_share: float


class IntervalRow(ReportValue):
    """One interval of the timeline."""

    id: str
    agent: str
    kind: IntervalKind
    name: str
    start_s: float
    end_s: float
    slack_s: float  # how much it may grow before the makespan does
    on_path: bool
    wasted: bool  # nothing that the end of the run needed came of it
    attributes: dict[str, Scalar] = Field(default_factory=dict[str, Scalar])


class EdgeRow(ReportValue):
    """One edge of the timeline, between interval ids."""

    kind: EdgeKind
    source: str
    target: str
    on_path: bool


class WhatIfRow(ReportValue):
    """The run recomputed with one change."""

    change: str
    makespan_s: float
    saved_s: float


class TeamFigures(ReportValue):
    """The team's run in figures; `teams.dag.DagStatistics` explains each."""

    parallelism: float
    structural_s: float
    work_s: float
    peak_concurrency: int
    average_concurrency: float
    serial_share: float
    critical_steps: int
    steps: int
    wasted_s: float


class TurnRow(ReportValue):
    """One turn of one agent. `text` comes from a model and `observation` from its tools: both are hostile."""

    agent: str
    number: int
    text: str
    action: str = ""
    observation: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    start_s: float = 0.0
    end_s: float = 0.0


class TeamReport(ReportValue):
    """One team run. `replay`: the model's outputs were recorded and forced through the live engine."""

    task: str
    replay: bool
    solved: bool
    diverged: bool  # a real tool output no longer fits the recording
    verdict: str = ""  # what the hidden tests said
    divergence: str = ""  # the first turn that differs
    agents: tuple[str, ...]
    agents_on_path: tuple[str, ...]
    edge_kinds_on_path: tuple[EdgeKind, ...]
    makespan_s: float
    critical_path_s: float
    segments: tuple[SegmentRow, ...]
    attribution: AttributionTables
    intervals: tuple[IntervalRow, ...]
    edges: tuple[EdgeRow, ...]
    figures: TeamFigures
    what_if: tuple[WhatIfRow, ...] = ()
    transcript: tuple[TurnRow, ...] = ()
    problems: tuple[str, ...] = ()  # edges of the log that could not be true and were left out


class PassRatesRow(ReportValue):
    """Scores over one denominator; None where no problem has k attempts."""

    attempts: int
    passed: int
    pass_at: dict[int, float | None]
    problems_at: dict[int, int] = Field(default_factory=dict[int, int])


class ProblemRow(ReportValue):
    """One problem: a verdict for each planned attempt, None where it was not reached."""

    task_id: str
    planned: int
    scored: int
    passed: int
    verdicts: tuple[str | None, ...] = ()
    details: tuple[str, ...] = ()


class HumanEvalReport(ReportValue):
    """A HumanEval run. The JSON of the evaluation's own result has these fields."""

    run_id: str = ""
    model: str
    problems: int
    attempts: int  # planned, a problem
    passed: int  # attempts
    solved: int  # problems with at least one attempt that passed
    pass_at_1: float
    pass_at_k: dict[int, float | None] = Field(default_factory=dict[int, float | None])
    of_planned: PassRatesRow
    of_scored: PassRatesRow
    verdicts: dict[str, int] = Field(default_factory=dict[str, int])
    rows: tuple[ProblemRow, ...] = ()


class WorkerRow(ReportValue):
    """One process that served the model."""

    role: Literal["prefill", "decode", "engine", "gateway"]
    pid: int
    model: str = ""
    detail: str = ""  # threads, memory, placement: one line


class RunReport(ReportValue):
    """Everything that one run of the product shows."""

    title: str
    created_at: AwareDatetime
    model: str
    workers: tuple[WorkerRow, ...] = ()
    humaneval: HumanEvalReport | None = None
    teams: tuple[TeamReport, ...] = ()
    environment: dict[str, str] = Field(default_factory=dict[str, str])
