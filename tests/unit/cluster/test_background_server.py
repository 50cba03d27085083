"""The wait for a server of one's own, and its end: real processes in a server's place."""

import json
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.background import ServerFailed, _end, _first_line, _limit_s
from cluster.config import DockyardConfig
from cluster.state import MARK, DeploymentRecord, StateFolder, marked_processes, started_at


@contextmanager
def process(log: Path, code: str, **environment: str) -> "Generator[subprocess.Popen[str]]":
    with log.open("w") as errors:
        started = subprocess.Popen(
            [sys.executable, "-c", f"import sys, time, signal, subprocess, os\n{code}"],
            env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
    with started:
        try:
            yield started
        finally:
            started.kill()


def test_stages_are_told_and_the_rest_of_the_log_is_not(tmp_path: Path) -> None:
    code = (
        "for part in ('· Ray is up\\n', 'a warning\\n', '· load', 'ed\\n'):\n"
        "    print(part, end='', file=sys.stderr, flush=True)\n"
        "print('{\"url\": 1}')"
    )
    told: list[str] = []
    with process(tmp_path / "log", code) as server:
        assert _first_line(server, tmp_path / "log", 60.0, told.append) == {"url": 1}
    assert told == ["Ray is up", "loaded"]


def test_a_server_that_is_late_is_named_with_its_last_words(tmp_path: Path) -> None:
    with process(tmp_path / "log", "time.sleep(600)") as server:
        (tmp_path / "log").write_text("· Ray is up\n")
        with pytest.raises(ServerFailed, match=r"not start within 0.1 s: · Ray is up"):
            _first_line(server, tmp_path / "log", 0.1, lambda text: None)


def test_the_servers_error_is_ours_in_kind_and_code(tmp_path: Path) -> None:
    error = {"type": "ResourceShortage", "code": "shortage", "message": "port 80 is taken", "hint": "another"}
    code = f"print({json.dumps(json.dumps({'error': error}))}); sys.exit(4)"
    with process(tmp_path / "log", code) as server, pytest.raises(ServerFailed, match="port 80") as caught:
        _first_line(server, tmp_path / "log", 60.0, lambda text: None)
    record = caught.value.record()
    assert (record["type"], record["code"], caught.value.exit_code) == ("ResourceShortage", "shortage", 4)


def test_the_servers_own_error_comes_first() -> None:
    config = DockyardConfig()
    assert _limit_s(config) > 2 * config.ray.start_timeout_s


def test_a_server_that_does_not_end_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.background._STOP_S", 0.1)
    state, scratch = StateFolder(tmp_path / "state"), tmp_path / "scratch"
    scratch.mkdir()
    code = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL)\n"
        "print('up', flush=True)\ntime.sleep(600)"
    )
    with process(tmp_path / "log", code, **{MARK: "dy-stuck"}) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "up\n"
        state.write(
            DeploymentRecord(
                id="dy-stuck",
                pid=server.pid,
                started_at=started_at(server.pid),
                scratch=str(scratch),
                model="m",
            )
        )
        assert len(list(marked_processes("dy-stuck", str(scratch)))) == 2
        _end(server, state)
        assert list(marked_processes("dy-stuck", str(scratch))) == []
    assert state.records() == []
    assert not scratch.exists()
