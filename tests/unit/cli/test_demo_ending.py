"""The demo's last sentence, that nothing is left, is said only where that is so."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.demo import LeftBehind, require_clean
from cluster.background import RunningServer
from cluster.state import MARK, DeploymentRecord, StateFolder


@pytest.fixture
def state(tmp_path: Path) -> StateFolder:
    return StateFolder(tmp_path)


@pytest.fixture
def worker() -> "Iterator[subprocess.Popen[bytes]]":
    with subprocess.Popen(["sleep", "600"], env={**os.environ, MARK: "dy-demo"}) as living:
        yield living
        living.kill()


def server(*pids: int) -> RunningServer:
    gone = DeploymentRecord(id="dy-demo", pid=2**22 + 1, started_at=1.0, scratch="/no/such", model="m")
    workers = tuple({"role": "decode", "pid": pid} for pid in pids)
    return RunningServer("http://127.0.0.1:1", gone.pid, workers, gone)


def test_all_has_ended(state: StateFolder, capsys: pytest.CaptureFixture[str]) -> None:
    require_clean(state, server(2**22 + 2))
    assert "nothing is left" in capsys.readouterr().err


def test_a_living_worker_is_named(
    state: StateFolder, worker: "subprocess.Popen[bytes]", capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(LeftBehind, match=f"process {worker.pid} .*, worker {worker.pid}"):
        require_clean(state, server(worker.pid))
    assert "nothing is left" not in capsys.readouterr().err


def test_a_record_is_named(state: StateFolder) -> None:
    state.write(server().record)
    with pytest.raises(LeftBehind, match="record dy-demo"):
        require_clean(state, server())
