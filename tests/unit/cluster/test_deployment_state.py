"""Records of deployments, and the ending of what a crash left: found by its mark, nothing else touched."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cluster.state import (
    MARK,
    DeploymentRecord,
    StateFolder,
    end_deployment,
    end_processes,
    is_alive,
    is_running,
    marked_processes,
    remains,
    started_at,
)

SLEEP = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"


@pytest.fixture
def state(tmp_path: Path) -> StateFolder:
    return StateFolder(tmp_path / "state")


class Children:
    """Real processes, each with a mark or without one."""

    def __init__(self) -> None:
        self._all: list[subprocess.Popen[str]] = []

    def start(self, mark: str | None, code: str = SLEEP) -> "subprocess.Popen[str]":
        environment = {**os.environ, **({MARK: mark} if mark else {})}
        child = subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
        )
        self._all.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        return child

    def titled(self, title: str, folder: Path) -> "subprocess.Popen[str]":
        """A process without a mark that stands in the folder, under another title, as Ray's are."""
        sleep = shutil.which("sleep")
        child = subprocess.Popen(
            [title, "600"], executable=sleep, cwd=folder, stdout=subprocess.PIPE, text=True
        )
        self._all.append(child)
        return child

    def end(self) -> None:
        for child in self._all:
            child.kill()
            child.communicate()


@pytest.fixture
def children() -> Iterator[Children]:
    started = Children()
    yield started
    started.end()


def is_gone(child: "subprocess.Popen[str]") -> bool:
    """Ended. psutil may have taken its exit status, so there is none to compare."""
    child.wait(10)
    return not psutil.pid_exists(child.pid)


def record(pid: int, scratch: Path, started: float | None = None) -> DeploymentRecord:
    since = started_at(pid) if started is None else started
    return DeploymentRecord(id="dy-test", pid=pid, started_at=since, scratch=str(scratch), model="m")


def test_records_come_back_until_they_are_forgotten(state: StateFolder, tmp_path: Path) -> None:
    assert state.records() == []
    written = record(os.getpid(), tmp_path / "scratch")
    state.write(written)
    state.write(written)
    assert state.records() == [written]
    assert is_alive(written)
    state.forget("dy-test")
    state.forget("dy-test")
    assert state.records() == []


def test_a_torn_record_is_passed_over(state: StateFolder, tmp_path: Path) -> None:
    state.write(record(os.getpid(), tmp_path))
    (state.deployments / "torn.json").write_text('{"id": "dy')
    (state.deployments / "dy-other.partial").write_text("{}")
    assert [found.id for found in state.records()] == ["dy-test"]


def test_a_pid_that_was_used_again_is_not_the_server(tmp_path: Path) -> None:
    assert not is_alive(record(os.getpid(), tmp_path, started=1.0))
    assert not is_alive(record(2**22 + 1, tmp_path, started=1.0))


def test_marks_find_the_deployments_own_processes_alone(children: Children) -> None:
    own, other, plain = children.start("dy-own"), children.start("dy-other"), children.start(None)
    assert [process.pid for process in marked_processes("dy-own", "/no/such")] == [own.pid]
    end_processes(list(marked_processes("dy-own", "/no/such")))
    assert is_gone(own)
    assert other.poll() is plain.poll() is None


def test_in_the_scratch_folder_rays_processes_alone_are_the_deployments(
    children: Children, tmp_path: Path
) -> None:
    scratch = tmp_path / "dockyard-1"
    for folder in (scratch / "ray", tmp_path / "dockyard-12"):
        folder.mkdir(parents=True)
    agent = children.titled("ray::DashboardAgent", scratch)
    children.titled("ray::DashboardAgent", tmp_path / "dockyard-12")  # another's, whose name begins alike
    shell, reader = children.titled("bash", scratch / "ray"), children.titled(f"tail {scratch}", scratch)
    assert [process.pid for process in marked_processes("dy-own", str(scratch))] == [agent.pid]
    end_deployment(StateFolder(tmp_path / "state"), record(2**22 + 1, scratch, started=1.0), drain_s=1.0)
    assert is_gone(agent)
    assert shell.poll() is reader.poll() is None


def test_what_remains_of_a_deployment_is_listed(
    state: StateFolder, tmp_path: Path, children: Children
) -> None:
    gone = record(2**22 + 1, tmp_path / "scratch", started=1.0)
    assert remains(state, gone) == []
    worker = children.start("dy-test")
    (tmp_path / "scratch").mkdir()
    state.write(gone)
    (process, *rest) = remains(state, gone)
    assert process.startswith(f"process {worker.pid} ")
    assert rest == [f"folder {tmp_path / 'scratch'}", "record dy-test"]


def test_a_process_that_nobody_has_reaped_has_ended(children: Children) -> None:
    child = children.start(None)
    assert is_running(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_running(child.pid)
    child.wait(10)
    assert not is_running(child.pid)


def test_a_process_that_ignores_sigterm_is_killed(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.state._GRACE_S", 0.1)
    child = children.start("dy-own", STUBBORN)
    end_processes([psutil.Process(child.pid)])
    assert is_gone(child)


def test_a_crashed_server_leaves_nothing_and_is_told_once(
    state: StateFolder, tmp_path: Path, children: Children
) -> None:
    worker = children.start("dy-test")
    scratch = tmp_path / "scratch"
    (scratch / "ray").mkdir(parents=True)
    gone = record(2**22 + 1, scratch, started=1.0)
    state.write(gone)
    told = end_deployment(state, gone, drain_s=1.0)
    assert any(f"process {worker.pid}" in line for line in told)
    assert f"folder {scratch}" in told
    assert is_gone(worker)
    assert not scratch.exists()
    assert state.records() == []
    assert end_deployment(state, gone, drain_s=1.0) == []


def test_a_living_server_is_asked_to_end(state: StateFolder, tmp_path: Path, children: Children) -> None:
    server = children.start("dy-test")
    living = record(server.pid, tmp_path / "none")
    state.write(living)
    assert end_deployment(state, living, drain_s=5.0)[0] == f"deployment dy-test (pid {server.pid})"
    assert is_gone(server)
