"""What a killed server or owner has left: said, with the command that ends it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.main import run
from cluster.state import MARK, DeploymentRecord, StateFolder
from sandbox.audit import Audit, Leftover

PRINT = "import time; print('up', flush=True); time.sleep(600)"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DOCKYARD_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def worker(home: Path) -> "Iterator[subprocess.Popen[str]]":
    """Of a deployment whose server lives no more."""
    scratch = home / "scratch"
    scratch.mkdir()
    record = DeploymentRecord(
        id="dy-lost", pid=os.getpid(), started_at=1.0, scratch=str(scratch), model="smollm2", ready=True,
        url="http://127.0.0.1:9",
    )  # fmt: skip
    StateFolder(home).write(record)
    with subprocess.Popen(
        [sys.executable, "-c", PRINT], env={**os.environ, MARK: record.id}, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        yield child
        child.kill()


def test_status_says_what_a_killed_server_has_left(
    worker: "subprocess.Popen[str]", home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["status"]) == 0
    told = capsys.readouterr().out
    assert f"the server of smollm2 (id dy-lost, pid {os.getpid()}) was killed" in told
    assert "end what it has left with: dockyard down" in told
    assert f"  process {worker.pid} (" in told
    assert f"  folder {home}/scratch" in told
    assert "dockyard up" not in told
    assert run(["status", "--json"]) == 0
    (lost,) = json.loads(capsys.readouterr().out)["lost"]
    assert (lost["id"], len(lost["remains"])) == ("dy-lost", 2)


def test_chat_names_both_steps(
    worker: "subprocess.Popen[str]", home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["chat", "hello", "--json"]) == 2
    hint = json.loads(capsys.readouterr().out)["error"]["hint"]
    assert hint.index("dockyard down") < hint.index("dockyard up smollm2")


def test_down_ends_it_and_status_says_so(
    worker: "subprocess.Popen[str]", home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["down"]) == 0
    assert f"ended process {worker.pid}" in capsys.readouterr().out
    assert run(["status"]) == 0
    assert "no deployment is running; start one with: dockyard up" in capsys.readouterr().out


def test_what_sandboxes_have_left_goes_with_a_sweep(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["sandbox", "list"]) == 0
    assert "sweep" not in capsys.readouterr().out
    left = (Leftover("cgroup", "/sys/fs/cgroup/dockyard/x"),)
    monkeypatch.setattr("cli.sandboxes.check_integrity", lambda state: Audit((), left))
    assert run(["sandbox", "list"]) == 0
    *_, before, last = capsys.readouterr().out.splitlines()
    assert before == "left behind: cgroup /sys/fs/cgroup/dockyard/x"
    assert last == "remove what is left behind with: dockyard sandbox sweep"
