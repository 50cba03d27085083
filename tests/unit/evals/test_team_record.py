import asyncio
from dataclasses import replace

import pytest

from evals.store import Store
from evals.team_record import TeamRecord
from evals.verdicts import consequence
from teams.events import EventLog
from teams.harness.task import TeamOutcome
from teams.member import Turn
from teams.model_client import ModelError, ModelRefusedError
from teams.team import TeamResult, Verdict
from teams.workspace import Diff

TURN = Turn("lead", 1, "text", "run", "exit 0", "", 7, 11, 0, 2_000_000)


class Wall:
    """Seconds that pass when the test says so."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def wall():
    return Wall()


@pytest.fixture
def store(tmp_path, wall):
    with Store(tmp_path / "runs.db", wall_s=wall) as opened:
        yield opened


def outcome(ended, verdict):
    result = TeamResult("run-team", ended, verdict, Diff({"app.py": b"x"}, ("old.py",)), (), (TURN,))
    return TeamOutcome("h11", replay=False, result=result, events=EventLog("run-team"))


def kept(store, wall, value):
    with TeamRecord(store, "h11", {"model": "m"}) as record:
        assert store.run(record.run_id).status == "running"
        wall.now_s += 60
        record.keep(value)
    (trial,) = store.trials(record.run_id)
    return store.run(record.run_id), trial


def test_a_run_is_on_record_from_its_start_to_its_end(store, wall):
    run, trial = kept(store, wall, outcome("submit", Verdict(True, "12 passed")))
    assert (run.started_s, run.ended_s, run.status) == (100.0, 160.0, "finished")
    assert run.config == {"model": "m", "task": "h11"}
    assert (trial.verdict, trial.detail) == ("passed", "12 passed")
    assert trial.program == '{"changed": ["app.py"], "removed": ["old.py"]}'
    (turn,) = store.turns(trial.id)
    assert (turn.request_id, turn.reply, turn.timings_ms) == ("lead.1", "text", {"turn": 2.0})


@pytest.mark.parametrize(
    ("ended", "verdict", "stored"),
    [
        ("submit", Verdict(False, "1 failed"), ("failed", "1 failed")),
        ("gave up", Verdict(False, "no source changed"), ("failed", "no source changed")),
        ("deadline", None, ("unverified", "deadline")),
    ],
)
def test_only_what_was_judged_has_failed(ended, verdict, stored, store, wall):
    _, trial = kept(store, wall, outcome(ended, verdict))
    assert (trial.verdict, trial.detail) == stored
    assert consequence(trial.verdict).reward_valid == (verdict is not None)


@pytest.mark.parametrize(
    ("error", "verdict", "detail"),
    [
        (ModelError("no route"), "infrastructure", "ModelError: no route"),
        (ModelRefusedError("temperature 5"), "refused", "ModelRefusedError: temperature 5"),
        (asyncio.CancelledError(), "unverified", "CancelledError"),
        (KeyboardInterrupt(), "unverified", "KeyboardInterrupt"),
    ],
)
def test_a_run_that_raised_is_on_record_with_its_error(error, verdict, detail, store, wall):
    record = TeamRecord(store, "h11", {})
    with pytest.raises(type(error)), record:
        raise error
    (trial,) = store.trials(record.run_id)
    assert (trial.verdict, trial.detail) == (verdict, detail)
    assert not consequence(trial.verdict).scored
    assert store.run(record.run_id).status == "interrupted"


def test_what_its_sandboxes_lacked_is_on_record_with_a_run(store, wall):
    value = outcome("submit", Verdict(True, "12 passed", shortfalls=("guard",)))
    value = replace(value, result=replace(value.result, shortfalls=("apparmor", "guard")))
    run, _ = kept(store, wall, value)
    assert store.shortfalls(run.id) == ("apparmor", "guard")
