"""The state folder: where runs, caches and the records of what is running lie.

A deployment writes its record before it starts anything, and every process that it starts carries its id in
the environment. So whatever a crash leaves behind can be found, and nothing else is ever touched.
"""

import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

MARK = "DOCKYARD_DEPLOYMENT"
_GRACE_S = 5.0
_ROUNDS = 3  # what is ended may have started something meanwhile
_TEARDOWN_S = 45.0  # of the workers and of Ray on a busy machine; a quiet one takes three seconds


class DeploymentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`ready` and the fields after it are filled in once it serves."""

    id: str
    pid: int
    started_at: float  # of the process, so that a reused pid is not taken for it
    scratch: str  # sockets and Ray's session: short, since a socket's path is bounded
    model: str
    ready: bool = False
    url: str = ""


@dataclass(frozen=True, slots=True)
class StateFolder:
    """Paths below one root; made on first use."""

    root: Path

    @property
    def cache(self) -> Path:
        return self._made("cache")

    @property
    def runs(self) -> Path:
        return self._made("runs")

    @property
    def sandboxes(self) -> Path:
        return self._made("sandbox")

    @property
    def logs(self) -> Path:
        return self._made("log")

    @property
    def toolkit(self) -> Path:
        return self.root / "toolkit"

    @property
    def store(self) -> Path:
        return self._made("store") / "dockyard.sqlite"

    @property
    def deployments(self) -> Path:
        return self._made("deployments")

    def write(self, record: DeploymentRecord) -> None:
        path = self.deployments / f"{record.id}.json"
        partial = path.with_suffix(".partial")
        partial.write_bytes(msgspec.json.encode(record))
        partial.replace(path)

    def forget(self, deployment_id: str) -> None:
        (self.deployments / f"{deployment_id}.json").unlink(missing_ok=True)

    def records(self) -> list[DeploymentRecord]:
        """All records, of living and of dead deployments."""
        found: list[DeploymentRecord] = []
        for path in sorted(self.deployments.glob("*.json")):
            try:
                found.append(msgspec.json.decode(path.read_bytes(), type=DeploymentRecord))
            except (msgspec.DecodeError, FileNotFoundError):
                continue  # another process is removing it
        return found

    def _made(self, name: str) -> Path:
        path = self.root / name
        path.mkdir(parents=True, exist_ok=True)
        return path


def is_alive(record: DeploymentRecord) -> bool:
    """Whether the process that wrote the record still runs."""
    return _same(record.pid, record.started_at) is not None


def is_running(pid: int) -> bool:
    """Whether there is such a process that has not ended; one whose parent does not reap it has."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def started_at(pid: int) -> float:
    return psutil.Process(pid).create_time()


def end_deployment(state: StateFolder, record: DeploymentRecord, drain_s: float) -> list[str]:
    """End a deployment and whatever it left; returns a line for each thing ended.

    Blocks for at most `drain_s` plus some seconds. Safe to repeat.
    """
    ended: list[str] = []
    server = _same(record.pid, record.started_at)
    if server is not None and server.pid != psutil.Process().pid:
        ended.append(f"deployment {record.id} (pid {record.pid})")
        _signal(server, signal.SIGTERM)
        # It drains, then ends its workers and Ray, and only then itself: killed early, it would leave both.
        end_processes(_wait([server], drain_s + _TEARDOWN_S))
    ended += end_marked(record.id, record.scratch)
    if Path(record.scratch).exists():
        shutil.rmtree(record.scratch, ignore_errors=True)
        if server is None:
            ended.append(f"folder {record.scratch}")
    state.forget(record.id)
    return ended


def end_marked(deployment_id: str, scratch: str) -> list[str]:
    """End the deployment's processes but for this one; a line for each. Blocks for some seconds a round."""
    ended: list[str] = []
    for _ in range(_ROUNDS):
        leftovers = [p for p in marked_processes(deployment_id, scratch) if p.pid != os.getpid()]
        if not leftovers:
            break
        ended += [f"process {process.pid} ({_name(process)}) of {deployment_id}" for process in leftovers]
        end_processes(leftovers)
    return ended


def lost_deployments(state: StateFolder) -> list[DeploymentRecord]:
    """Those whose server was killed: it has not ended what it had started, and `end_deployment` does."""
    return [record for record in state.records() if not is_alive(record)]


def remains(state: StateFolder, record: DeploymentRecord) -> list[str]:
    """What is still there of a deployment that has ended: a line for each thing, none if all is well."""
    left = [f"process {p.pid} ({_name(p)})" for p in marked_processes(record.id, record.scratch)]
    if is_alive(record):
        left.append(f"server {record.pid}")
    if Path(record.scratch).exists():
        left.append(f"folder {record.scratch}")
    return left + [f"record {known.id}" for known in state.records() if known.id == record.id]


def marked_processes(deployment_id: str, scratch: str) -> Iterator[psutil.Process]:
    """Processes with the deployment's id in their environment, and Ray's in its scratch folder.

    Ray writes the titles of its Python processes over their environment, so that title and folder are all
    that tells them. The folder alone tells nothing: a person may read a log there.
    """
    for process in psutil.process_iter():
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if _is_rays(process, Path(scratch)) or process.environ().get(MARK) == deployment_id:
                yield process
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue


def _is_rays(process: psutil.Process, folder: Path) -> bool:
    return "".join(process.cmdline()[:1]).startswith("ray::") and Path(process.cwd()).is_relative_to(folder)


def end_processes(processes: list[psutil.Process]) -> None:
    """SIGTERM, then SIGKILL for those that stay. Blocks for some seconds at most."""
    for process in processes:
        _signal(process, signal.SIGTERM)
    for process in _wait(processes, _GRACE_S):
        _signal(process, signal.SIGKILL)
    _wait(processes, _GRACE_S)


def _wait(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    return psutil.wait_procs(processes, timeout=timeout_s)[1]


def _signal(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def _same(pid: int, started: float) -> psutil.Process | None:
    try:
        process = psutil.Process(pid)
        alive = process.create_time() == started and process.status() != psutil.STATUS_ZOMBIE
        return process if alive else None
    except psutil.NoSuchProcess:
        return None


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return "gone"
