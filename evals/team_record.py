"""A team's run in the store: one run, one trial, a turn for each call of the model."""

import json
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from evals.store import Store, Turn
from evals.verdicts import Verdict
from teams.harness.task import TeamOutcome
from teams.member import Turn as TeamTurn
from teams.model_client import ModelRefusedError
from teams.team import TeamResult


class TeamRecord:
    """One team's run, on record from before it starts: go into it, run the team, `keep` what came of it.

    Left by an error, the run is interrupted and its trial says by what; killed with its process, it stays
    running. Belongs to one thread, like the store.
    """

    def __init__(self, store: Store, task: str, config: Mapping[str, Any]) -> None:
        self._store = store
        self._task = task
        self._config = {**config, "task": task}
        self.run_id = ""  # in the store; "" before the run has begun

    def __enter__(self) -> Self:
        self.run_id = self._store.start_run("team", self._config)
        self._trial = self._store.plan_trial(self.run_id, self._task, 0)
        return self

    def keep(self, outcome: TeamOutcome) -> None:
        """Writes the turns, the verdict and the shortfalls of a run that has come to its end."""
        result = outcome.result
        self._store.note_shortfalls(self.run_id, result.shortfalls)
        for turn in result.transcript:
            self._store.record_turn(self._trial.id, _stored(turn))
        detail = result.verdict.detail if result.verdict else result.ended
        program = json.dumps({"changed": sorted(result.diff.changed), "removed": list(result.diff.removed)})
        self._judge(verdict_of(result), detail, program)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._judge(_verdict_of_error(error), f"{type(error).__name__}: {error}".rstrip(": "), "")
        self._store.end_run(self.run_id, "finished" if error is None else "interrupted")

    def _judge(self, verdict: Verdict, detail: str, program: str) -> None:
        self._store.record_verdict(self._trial.id, verdict, detail=detail, program=program, grading_ms=None)


def verdict_of(result: TeamResult) -> Verdict:
    """What the hidden tests said; `unverified` where a run ended before they could run. Pure."""
    if result.verdict is None:
        return "unverified"
    return "passed" if result.solved else "failed"


def _verdict_of_error(error: BaseException) -> Verdict:
    if isinstance(error, ModelRefusedError):
        return "refused"
    return "infrastructure" if isinstance(error, Exception) else "unverified"  # cancelled, interrupted


def _stored(turn: TeamTurn) -> Turn:
    return Turn(
        request_id=f"{turn.agent}.{turn.number}",
        config={"agent": turn.agent, "action": turn.action},
        reply=turn.text,
        prompt_tokens=turn.prompt_tokens,
        completion_tokens=turn.completion_tokens,
        timings_ms={"turn": (turn.end_ns - turn.start_ns) / 1e6},
    )
