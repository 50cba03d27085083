"""Ctrl-C, SIGTERM and SIGHUP at any moment of a command: its code, and nothing left."""

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
    sandbox = ["sandbox", "run", "--", "sh", "-c", "echo started; exec sleep 100"]
    with subprocess.Popen(
        [sys.executable, "-m", "cli.main", *sandbox], stderr=subprocess.PIPE, text=True,
        env={**os.environ, "DOCKYARD_HOME": str(default_home())},
    ) as command:  # fmt: skip
        _until_a_sandbox_of(command.pid)
        command.send_signal(number)
        _, told = command.communicate()
    assert command.returncode == code
    assert told.endswith("\ninterrupted; everything it started has ended\n")  # behind what this host lacks
    assert not check_integrity(default_state_dir()).leftovers


def _until_a_sandbox_of(pid: int) -> None:
    """Until the process has children: a launcher with its sandbox."""
    seen = ""
    while not seen.strip():
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(OSError):  # of a thread that has ended
                seen += children.read_text()
