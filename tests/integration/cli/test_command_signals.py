"""Ctrl-C, SIGTERM and SIGHUP at any moment of a command: its code, and nothing left."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from sandbox.audit import check_integrity
from sandbox.places import default_home, default_state_dir

SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_while_the_modules_load(number: signal.Signals, code: int, tmp_path: Path) -> None:
    """The process tells us that it is within an import by opening a pipe that it finds there."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "typer.py").write_text(
        f"open({str(tmp_path / 'pipe')!r}, 'w').close(); import time; time.sleep(60)"
    )
    program = "from cli.main import main; main()"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}
    with subprocess.Popen(
        [sys.executable, "-c", program, "chat"], stderr=subprocess.PIPE, text=True, env=environment
    ) as command:
        (tmp_path / "pipe").read_text()
        command.send_signal(number)
        _, told = command.communicate()
    assert (command.returncode, told) == (code, "")


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_while_a_sandbox_runs(number: signal.Signals, code: int) -> None:
    with _sandbox_run("--json") as command:
        _until_a_sandbox_of(command.pid)
        command.send_signal(number)
        printed, told = command.communicate()
    assert (command.returncode, json.loads(printed)["error"]["code"]) == (code, "interrupted")
    assert told.endswith("\ninterrupted; everything it started has ended\n")  # behind what this host lacks
    assert not check_integrity(default_state_dir()).leftovers


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_further_ones_change_nothing(words: tuple[str, ...]) -> None:
    """Two milliseconds apart, until the interpreter is gone."""
    for _ in range(3):
        with _sandbox_run(*words) as command:
            _until_a_sandbox_of(command.pid)
            command.send_signal(signal.SIGINT)
            assert command.stderr is not None
            told = [line for line in iter(command.stderr.readline, "") if _again(command, line)]
        assert (command.returncode, told[-1]) == (130, "interrupted; everything it started has ended\n")
    assert not check_integrity(default_state_dir()).leftovers


HANGS = """
import atexit, threading
from cli import ending
ending._LAST_S = 0.3
atexit.register(threading.Event().wait)
ending.Ending().no_more()
"""


def test_an_end_that_hangs_is_ended() -> None:
    """Nothing else could, but kill -9."""
    done = subprocess.run([sys.executable, "-c", HANGS], timeout=60, check=False)
    assert done.returncode == -signal.SIGALRM


def _again(command: "subprocess.Popen[str]", line: str) -> bool:
    """Once it has said that it is at its end."""
    while line.startswith("interrupted") and command.poll() is None:
        command.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            command.wait(0.002)
    return True


def _sandbox_run(*words: str) -> "subprocess.Popen[str]":
    command = ["sandbox", "run", *words, "--", "sh", "-c", "exec sleep 100"]
    return subprocess.Popen(
        [sys.executable, "-m", "cli.main", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env={**os.environ, "DOCKYARD_HOME": str(default_home())},
    )  # fmt: skip


def _until_a_sandbox_of(pid: int) -> None:
    """Until the process has children: a launcher with its sandbox."""
    seen = ""
    while not seen.strip():
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(OSError):  # of a thread that has ended
                seen += children.read_text()
