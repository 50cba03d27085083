from pathlib import Path

import pytest

from protocol.clock import SystemClock
from teams.events import EventLog
from teams.recorder import Recorder


def test_what_runs_when_the_process_dies_is_in_the_file(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    with EventLog("run-test", path) as log:
        recorder = Recorder("ada", log, SystemClock())
        with recorder.interval("tool.run", "run", command="sleep 600"):
            (running,) = EventLog.load(path).unfinished  # what a crash at this moment leaves
    assert (running.agent, running.kind, running.name) == ("ada", "tool.run", "run")
    assert running.attributes == {"command": "sleep 600", "unfinished": True}
    done = EventLog.load(path)
    assert not done.unfinished
    assert [interval.id for interval in done.intervals] == [running.id]


def test_an_interval_that_fails_is_completed_and_says_by_what():
    log = EventLog("run-test")
    recorder = Recorder("ada", log, SystemClock())
    with pytest.raises(ValueError, match="no"), recorder.interval("harness", "start", note="kept"):
        raise ValueError("no")
    (interval,) = log.intervals
    assert interval.attributes == {"note": "kept", "ended_by": "ValueError"}
    assert not log.unfinished
