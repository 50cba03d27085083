"""A deployment in a process of its own: for `dockyard up`, and for commands that need one meanwhile."""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cluster.config import DockyardConfig, child_environment
from cluster.state import DeploymentRecord, StateFolder, is_alive
from protocol.errors import DockyardError

_STOP_S = 60.0


class ServerFailed(DockyardError):
    """The server process ended before it served."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that serves."""

    url: str
    pid: int
    workers: tuple[dict[str, Any], ...]  # role and pid of each


@contextmanager
def running_server(config: DockyardConfig) -> Generator[RunningServer]:
    """A server for the length of the block, on a free port if the configuration says 0.

    Blocks until it serves and until it has ended; it ends too when this process is killed. Raises the error
    that the server printed.
    """
    folder = _log_folder(StateFolder(config.state_dir))
    process = _spawn(config, folder, detached=False)
    try:
        ready = _first_line(process, folder / "log", config.ray.start_timeout_s)
        yield RunningServer(ready["url"], process.pid, tuple(ready["workers"]))
    finally:
        _end(process)
    shutil.rmtree(folder, ignore_errors=True)  # kept where something went wrong


def start_in_background(config: DockyardConfig) -> DeploymentRecord:
    """A server that outlives this process; its log lies in the state folder. Blocks until it serves.

    Raises ServerFailed, and then has ended what it started.
    """
    state = StateFolder(config.state_dir)
    folder = _log_folder(state)
    process = _spawn(config, folder, detached=True)
    try:
        _first_line(process, folder / "log", config.ray.start_timeout_s)
        mine = [record for record in state.records() if record.pid == process.pid and is_alive(record)]
        if not mine:
            raise ServerFailed(f"the server ended at once: {_last_line(folder / 'log')}")
    except BaseException:
        _end(process)
        raise
    return mine[0]


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


def _first_line(process: "subprocess.Popen[str]", log: Path, timeout_s: float) -> dict[str, Any]:
    """What the server says when it is ready. Raises ServerFailed with what it said instead."""
    assert process.stdout is not None
    killer = threading.Timer(timeout_s, process.kill)  # which ends the line that is waited for
    killer.start()
    try:
        line = process.stdout.readline()
    finally:
        killer.cancel()  # or its thread keeps an interrupted command alive
    if not line:
        late = f" within {timeout_s:g} s" if process.wait() == -signal.SIGKILL else ""
        raise ServerFailed(f"the server did not start{late}: {_last_line(log)}", hint=f"its log: {log}")
    value = json.loads(line)
    if "error" in value:
        process.wait()
        raise ServerFailed(value["error"]["message"], hint=value["error"]["hint"])
    return value


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"


def _end(process: "subprocess.Popen[str]") -> None:
    """SIGTERM and wait; SIGKILL only if that does not end it."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        killer = threading.Timer(_STOP_S, process.kill)
        killer.start()
        try:
            process.wait()
        finally:
            killer.cancel()
    if process.stdout is not None:
        process.stdout.close()
