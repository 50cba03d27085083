import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from evals.store import Store, Turn
from protocol.errors import InvalidInput

TURN = Turn("req-1", {"seed": 5}, "a reply", 10, 20, {"model.decode": 1.5})


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "runs.db", wall_s=lambda: 100.0) as opened:
        yield opened


def test_a_run_from_start_to_end(store):
    run_id = store.start_run("humaneval", {"b": [1], "a": None})
    assert store.run(run_id).config == {"a": None, "b": [1]}
    assert (store.run(run_id).status, store.run(run_id).ended_s) == ("running", None)
    store.end_run(run_id, "finished")
    assert (store.run(run_id).status, store.run(run_id).ended_s) == ("finished", 100.0)
    assert [run.id for run in store.runs()] == [run_id]


def test_what_sandboxes_went_without_is_kept_with_the_run(store):
    run_id, other = store.start_run("humaneval", {}), store.start_run("humaneval", {})
    store.note_shortfalls(run_id, ["guard", "apparmor"])
    store.note_shortfalls(run_id, ["apparmor"])
    assert store.shortfalls(run_id) == ("apparmor", "guard")
    assert store.shortfalls(other) == ()


def test_a_trial_through_its_stages(store):
    run_id = store.start_run("humaneval", {})
    trial = store.plan_trial(run_id, "t/0", 0)
    assert (trial.status, trial.verdict) == ("planned", None)
    store.record_turn(trial.id, TURN)
    assert store.plan_trial(run_id, "t/0", 0).status == "generated"
    assert store.turns(trial.id) == (TURN,)
    store.record_verdict(trial.id, "failed", detail="why", program="x = 1", grading_ms=3.0)
    done = store.plan_trial(run_id, "t/0", 0)
    assert (done.id, done.status, done.verdict, done.detail) == (trial.id, "done", "failed", "why")
    assert (done.program, done.grading_ms) == ("x = 1", 3.0)


def test_trials_keep_their_order_and_their_run(store):
    first, second = store.start_run("humaneval", {}), store.start_run("humaneval", {})
    for run_id in (first, second):
        for task_id in ("b", "a"):
            store.plan_trial(run_id, task_id, 0)
    assert [trial.task_id for trial in store.trials(first)] == ["b", "a"]
    assert not {trial.id for trial in store.trials(first)} & {trial.id for trial in store.trials(second)}


def test_what_was_written_is_there_after_a_reopen(tmp_path):
    path = tmp_path / "runs.db"
    with Store(path) as store:
        run_id = store.start_run("team", {})
    with Store(path) as store:
        assert store.run(run_id).kind == "team"


def test_a_killed_process_loses_nothing_that_it_had_recorded(tmp_path):
    path = tmp_path / "runs.db"
    program = f"""
import os, signal
from pathlib import Path
from evals.store import Store
store = Store(Path({str(path)!r}))
run_id = store.start_run("humaneval", {{}})
trial = store.plan_trial(run_id, "t/0", 0)
store.record_verdict(trial.id, "passed", detail="", program="", grading_ms=None)
os.kill(os.getpid(), signal.SIGKILL)
"""
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    assert subprocess.run([sys.executable, "-c", program], env=environment, check=False).returncode == -9
    with Store(path) as store:
        (run,) = store.runs()
        assert run.status == "running"
        assert [trial.verdict for trial in store.trials(run.id)] == ["passed"]


def test_unknown_ids_are_named(store):
    with pytest.raises(InvalidInput, match="no run 'run-0'"):
        store.run("run-0")
    with pytest.raises(InvalidInput, match="no trial 'trial-0'"):
        store.record_turn("trial-0", TURN)


def test_a_file_that_is_no_database_is_named(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("these are notes, and there are enough of them to fill a header")
    with pytest.raises(InvalidInput, match=r"notes\.txt cannot be opened as a database"):
        Store(path)
    assert path.read_text().startswith("these are notes")
    with pytest.raises(InvalidInput, match="cannot be opened"):
        Store(tmp_path / "no" / "such" / "folder.db")


def test_any_sqlite_tool_can_read_it(tmp_path):
    path = tmp_path / "runs.db"
    with Store(path) as store:
        store.start_run("humaneval", {})
    connection = sqlite3.connect(path)
    assert connection.execute("select count(*) from runs").fetchone() == (1,)
    assert connection.execute("pragma journal_mode").fetchone() == ("wal",)
    connection.close()


@pytest.mark.parametrize(
    ("table", "column", "value", "says"),
    [
        ("runs", "config", "{", "run 'run-.*' is damaged: config is not JSON"),
        ("runs", "config", "[" * 100_000, "run 'run-.*' is damaged: config is not JSON"),
        ("runs", "config", b"\xff", "run 'run-.*' is damaged: config is bytes"),
        ("runs", "config", "[]", r"run 'run-.*' is damaged: .*\$.config"),
        ("runs", "status", "dancing", r"run 'run-.*' is damaged: .*\$.status"),
        ("runs", "started_s", "soon", r"run 'run-.*' is damaged: .*\$.started_s"),
        ("trials", "verdict", "splendid", r"trial 'trial-.*' is damaged: .*\$.verdict"),
        ("trials", "attempt", "one", r"trial 'trial-.*' is damaged: .*\$.attempt"),
        ("turns", "timings_ms", '{"a": "b"}', r"turn 1 of trial 'trial-.*' is damaged: .*\$.timings_ms"),
        ("turns", "prompt_tokens", "many", r"turn 1 of trial 'trial-.*' is damaged: .*\$.prompt_tokens"),
    ],
)
def test_a_damaged_row_is_named(tmp_path, table, column, value, says):
    path = tmp_path / "runs.db"
    with Store(path) as store:
        run_id = store.start_run("humaneval", {})
        trial = store.plan_trial(run_id, "t/0", 0)
        store.record_turn(trial.id, TURN)
        connection = sqlite3.connect(path)
        connection.execute(f"update {table} set {column} = ?", (value,))
        connection.commit()
        connection.close()
        with pytest.raises(InvalidInput, match=says):
            store.run(run_id), store.trials(run_id), store.turns(trial.id)


@pytest.mark.parametrize("damage", ["drop table trials", "update trials set detail = cast(x'ff' as text)"])
def test_a_file_that_sqlite_cannot_read_as_ours_is_named(tmp_path, damage):
    path = tmp_path / "runs.db"
    with Store(path) as store:
        run_id = store.start_run("humaneval", {})
        store.plan_trial(run_id, "t/0", 0)
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute("pragma foreign_keys = off")
        connection.execute(damage)
        connection.close()
        with pytest.raises(InvalidInput, match=r"store: .*runs\.db: "):
            store.trials(run_id)
