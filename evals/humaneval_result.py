"""What a HumanEval run came to."""

from collections import Counter
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from evals.humaneval_config import HumanEvalConfig
from evals.metrics import PassRates, Tally, rates_of_planned, rates_of_scored
from evals.problems import Problem
from evals.store import Trial
from evals.verdicts import Verdict, consequence


class ProblemRow(BaseModel):
    """One problem. `verdicts` has an entry for each planned attempt, in order; None: not reached."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    task_id: str
    planned: int
    scored: int
    passed: int
    verdicts: tuple[Verdict | None, ...]
    details: tuple[str, ...]  # why each verdict, in a line


class HumanEvalResult(BaseModel):
    """Scores and their evidence. `pass_at_1` and `pass_at_k` are those of the planned attempts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run_id: str
    model: str
    problems: int
    attempts: int  # planned, a problem
    passed: int  # attempts that passed
    solved: int  # problems with at least one
    pass_at_1: float
    pass_at_k: dict[int, float | None]
    of_planned: PassRates  # what was not scored counts as not passed
    of_scored: PassRates  # only what the model is answerable for
    verdicts: dict[str, int]  # verdict -> attempts
    rows: tuple[ProblemRow, ...]


def summarise(
    run_id: str, config: HumanEvalConfig, problems: Sequence[Problem], trials: Sequence[Trial]
) -> HumanEvalResult:
    """Count the trials of a run. Trials that the configuration does not plan are left out. Pure."""
    by_key = {(trial.task_id, trial.attempt): trial for trial in trials}
    rows = tuple(_row(problem.task_id, config.attempts, by_key) for problem in problems)
    tallies = [Tally(row.planned, row.scored, row.passed) for row in rows]
    ks = config.ks or (1, config.attempts)
    of_planned = rates_of_planned(tallies, (1, *ks))
    return HumanEvalResult(
        run_id=run_id,
        model=config.model,
        problems=len(rows),
        attempts=config.attempts,
        passed=of_planned.passed,
        solved=sum(row.passed > 0 for row in rows),
        pass_at_1=of_planned.pass_at[1] or 0.0,
        pass_at_k=of_planned.pass_at,
        of_planned=of_planned,
        of_scored=rates_of_scored(tallies, (1, *ks)),
        verdicts=dict(Counter(verdict for row in rows for verdict in row.verdicts if verdict)),
        rows=rows,
    )


def _row(task_id: str, attempts: int, by_key: dict[tuple[str, int], Trial]) -> ProblemRow:
    trials = [by_key.get((task_id, attempt)) for attempt in range(attempts)]
    verdicts: tuple[Verdict | None, ...] = tuple(trial.verdict if trial else None for trial in trials)
    return ProblemRow(
        task_id=task_id,
        planned=attempts,
        scored=sum(verdict is not None and consequence(verdict).scored for verdict in verdicts),
        passed=verdicts.count("passed"),
        verdicts=verdicts,
        details=tuple(trial.detail if trial else "" for trial in trials),
    )
