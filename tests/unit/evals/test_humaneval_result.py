import pytest
from pydantic import ValidationError

from evals.humaneval import sampling_seed
from evals.humaneval_config import RESUMABLE_FIELDS, HumanEvalConfig
from evals.humaneval_result import HumanEvalResult, summarise
from evals.problems import Problem
from evals.store import Trial
from evals.verdicts import VERDICTS, consequence

PROBLEMS = [Problem(f"t/{index}", "f", "def f():\n", "", "") for index in range(2)]


def trial(task_id, attempt, verdict):
    return Trial(f"trial-{task_id}-{attempt}", task_id, attempt, "done", verdict, f"why {verdict}", "", None)


def test_summary_of_a_run_with_gaps():
    trials = [
        trial("t/0", 0, "passed"),
        trial("t/0", 1, "failed"),
        trial("t/1", 0, "infrastructure"),  # its second attempt was never reached
        trial("t/1", 7, "passed"),  # beyond the plan, from an earlier and larger run
        trial("t/9", 0, "passed"),
    ]
    result = summarise("run-1", HumanEvalConfig(attempts=2), PROBLEMS, trials)
    assert (result.problems, result.attempts, result.passed, result.solved) == (2, 2, 1, 1)
    assert result.pass_at_k == {1: 0.25, 2: 0.5}
    assert result.of_scored.pass_at == {1: 0.5, 2: 1.0}
    assert result.of_scored.problems_at == {1: 1, 2: 1}
    assert result.verdicts == {"passed": 1, "failed": 1, "infrastructure": 1}
    assert result.rows[1].verdicts == ("infrastructure", None)
    assert result.rows[1].details == ("why infrastructure", "")


def test_result_survives_json():
    result = summarise("run-1", HumanEvalConfig(), PROBLEMS, [trial("t/0", 0, "passed")])
    assert HumanEvalResult.model_validate_json(result.model_dump_json()) == result


def test_only_failures_of_ours_are_retried_and_only_the_models_are_scored():
    for verdict in VERDICTS:
        follows = consequence(verdict)
        ours = verdict in ("infrastructure", "unverified")
        models = not ours and verdict != "refused"
        assert (follows.retry, follows.scored, follows.reward_valid) == (ours, models, models)


def test_seeds_differ_and_stay():
    seeds = {
        sampling_seed(run, f"t/{task}", attempt)
        for run in (0, 1)
        for task in range(5)
        for attempt in range(5)
    }
    assert len(seeds) == 50
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert sampling_seed(0, "HumanEval/0", 0) == 816897152


@pytest.mark.parametrize("field", ["attempts", "limit", "max_tokens", "generation_concurrency"])
def test_config_refuses_nothing_at_all(field):
    with pytest.raises(ValidationError, match=field):
        HumanEvalConfig(**{field: 0})


def test_resumable_fields_exist():
    assert set(HumanEvalConfig.model_fields) >= RESUMABLE_FIELDS
