"""A team's run in the store: one run, one trial, a turn for each call of the model."""

import json
from collections.abc import Mapping
from typing import Any

from evals.store import Store, Turn
from evals.verdicts import Verdict
from teams.harness.task import TeamOutcome


def record_outcome(store: Store, outcome: TeamOutcome, config: Mapping[str, Any]) -> str:
    """Writes a finished run and returns its id in the store."""
    result = outcome.result
    whole = {**config, "task": outcome.task, "replay": outcome.replay, "team_run_id": result.run_id}
    run_id = store.start_run("team", whole)
    trial = store.plan_trial(run_id, outcome.task, 0)
    for turn in result.transcript:
        store.record_turn(
            trial.id,
            Turn(
                request_id=f"{turn.agent}.{turn.number}",
                config={"agent": turn.agent, "action": turn.action},
                reply=turn.text,
                prompt_tokens=turn.prompt_tokens,
                completion_tokens=turn.completion_tokens,
                timings_ms={"turn": (turn.end_ns - turn.start_ns) / 1e6},
            ),
        )
    verdict: Verdict = "passed" if result.solved else "failed"
    detail = result.verdict.detail if result.verdict else result.ended
    program = json.dumps({"changed": sorted(result.diff.changed), "removed": list(result.diff.removed)})
    store.record_verdict(trial.id, verdict, detail=detail, program=program, grading_ms=None)
    store.end_run(run_id, "finished")
    return run_id
