"""A deployment in a process of its own: for `dockyard up`, and for commands that need one meanwhile."""

import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from cluster.config import DockyardConfig, child_environment
from cluster.lifeline import PROGRESS
from cluster.state import DeploymentRecord, StateFolder, end_deployment, is_alive
from protocol.errors import DockyardError

_STOP_S = 60.0
_RAY_S = 60.0  # for Ray to start on a busy machine; a quiet one takes five seconds
_GLANCE_S = 0.2  # how often the log is looked at for progress

Say = Callable[[str], None]


class ServerFailed(DockyardError):
    """The server process ended before it served. Its record's type and code, and the exit code, are those of
    its own error, where it told one."""

    def __init__(
        self, message: str, *, hint: str = "", kind: str = "", code: str = "", exit_code: int = 1
    ) -> None:
        super().__init__(message, hint=hint)
        self._named = {"type": kind, "code": code} if kind else {}
        self.exit_code = exit_code

    def record(self) -> dict[str, Any]:
        return {**super().record(), **self._named}


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that serves."""

    url: str
    pid: int
    workers: tuple[dict[str, Any], ...]  # role and pid of each
    record: DeploymentRecord


@contextmanager
def running_server(config: DockyardConfig, say: Say) -> Generator[RunningServer]:
    """A server for the length of the block, on a free port if the configuration says 0.

    Blocks until it serves and until it has ended; it ends too when this process is killed. `say` is told each
    stage of its start. Raises the error that the server printed.
    """
    state = StateFolder(config.state_dir)
    folder = _log_folder(state)
    process = _spawn(config, folder, detached=False)
    try:
        ready = _first_line(process, folder / "log", _limit_s(config), say)
        yield RunningServer(
            ready["url"], process.pid, tuple(ready["workers"]), _record(process, state, folder)
        )
    finally:
        _end(process, state)
    shutil.rmtree(folder, ignore_errors=True)  # kept where something went wrong


def start_in_background(config: DockyardConfig, say: Say) -> DeploymentRecord:
    """A server that outlives this process; its log lies in the state folder. Blocks until it serves.

    `say` is told each stage of its start. Raises ServerFailed, and then has ended what it started.
    """
    state = StateFolder(config.state_dir)
    folder = _log_folder(state)
    process = _spawn(config, folder, detached=True)
    try:
        _first_line(process, folder / "log", _limit_s(config), say)
        return _record(process, state, folder)
    except BaseException:
        _end(process, state)
        raise


def _log_folder(state: StateFolder) -> Path:
    folder = state.logs / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
    folder.mkdir()
    return folder


def _spawn(config: DockyardConfig, folder: Path, *, detached: bool) -> "subprocess.Popen[str]":
    settings = folder / "config.yaml"
    settings.write_text(config.resolved_yaml())
    # -P: the folder that the caller stands in must not bring code of its own under our names.
    command = [sys.executable, "-P", "-m", "cli.main", "serve", "--config", str(settings), "--json"]
    with (folder / "log").open("w") as log:
        return subprocess.Popen(
            command if detached else [*command, "--with-parent", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=child_environment(PYTHONUNBUFFERED="1"),
            # Ctrl-C reaches the command, which ends the server in order.
            start_new_session=True,
        )


def _limit_s(config: DockyardConfig) -> float:
    """Longer than a start whose every part takes its own limit: their errors say more than ours."""
    return _RAY_S + 2 * config.ray.start_timeout_s


def _first_line(process: "subprocess.Popen[str]", log: Path, limit_s: float, say: Say) -> dict[str, Any]:
    """What the server says when it is ready. Raises ServerFailed with what it said instead."""
    assert process.stdout is not None
    deadline = time.monotonic() + limit_s
    with log.open("rb") as told:
        while not select.select([process.stdout], [], [], _GLANCE_S)[0]:
            _forward(told, say)
            if time.monotonic() > deadline:
                raise ServerFailed(
                    f"the server did not start within {limit_s:g} s: {_last_line(log)}",
                    hint=f"its log: {log}",
                )
        _forward(told, say)
    line = process.stdout.readline()
    if not line:
        raise ServerFailed(f"the server did not start: {_last_line(log)}", hint=f"its log: {log}")
    value = json.loads(line)
    if "error" in value:
        error = value["error"]
        raise ServerFailed(
            error["message"], hint=error["hint"], kind=error["type"], code=error["code"],
            exit_code=process.wait() or 1,
        )  # fmt: skip
    return value


def _forward(log: BinaryIO, say: Say) -> None:
    """Tell the lines of progress that the log has gained; half a line waits for its end."""
    while (line := log.readline()).endswith(b"\n"):
        text = line.decode(errors="replace").strip()
        if text.startswith(PROGRESS):
            say(text.removeprefix(PROGRESS))
    log.seek(-len(line), os.SEEK_CUR)


def _record(process: "subprocess.Popen[str]", state: StateFolder, folder: Path) -> DeploymentRecord:
    mine = [record for record in state.records() if record.pid == process.pid and is_alive(record)]
    if not mine:
        raise ServerFailed(f"the server ended at once: {_last_line(folder / 'log')}")
    return mine[0]


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"


def _end(process: "subprocess.Popen[str]", state: StateFolder) -> None:
    """SIGTERM and wait; SIGKILL only if that does not end it, and then whatever it left."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdout is not None:
        process.stdout.close()
    for record in state.records():
        if record.pid == process.pid:
            end_deployment(state, record, drain_s=0.0)
