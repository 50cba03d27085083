"""A deployment with its gateway in one process: what `dockyard serve` runs."""

import asyncio
import math
import os
import socket
from collections.abc import Callable, Generator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any

import uvicorn

from actors.token_client import TokenClient
from cluster.config import DockyardConfig
from cluster.deployment import Deployment, deployed
from cluster.lifeline import signals_heard
from cluster.state import DeploymentRecord, StateFolder, is_alive, started_at
from gateway.app import create_app
from gateway.service import ChatService
from protocol.errors import DockyardError, ResourceShortage
from protocol.ready_threads import ReadyThreads
from protocol.threads import NoThread
from protocol.worker_counts import WorkerCounts


class WorkerLost(DockyardError):
    """A worker's process has ended by itself."""


Ready = Callable[[str, Deployment], None]


def serve(config: DockyardConfig, on_ready: Ready, say: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, which let running requests end within `gateway.drain_s`.

    Blocks; `say` is told each stage of the start. For a block of `signals_held`. Everything that was started
    has ended when it returns or raises. Raises Stopped on a signal, ResourceShortage where the port is taken
    or there are no threads, and what `deployed` raises.
    """
    state = StateFolder(config.state_dir)
    # The threads are not the loop's own: it starts one more to end those, and waits for it without end.
    with (
        _listening(config, state) as listener,
        deployed(config, state, say) as deployment,
        _threads() as threads,
    ):
        host, port = listener.getsockname()[:2]
        url = f"http://{host}:{port}"

        def ready() -> None:
            _record_ready(state, deployment, url)
            say(f"the gateway listens at {url}")
            on_ready(url, deployment)

        with signals_heard():  # while the gateway runs, uvicorn drains first
            asyncio.run(_gateway(config, deployment, listener, threads, ready))


async def _gateway(
    config: DockyardConfig,
    deployment: Deployment,
    listener: socket.socket,
    threads: Executor,
    on_ready: Callable[[], None],
) -> None:
    loop = asyncio.get_running_loop()

    async def status() -> dict[str, Any]:
        return await loop.run_in_executor(threads, deployment.describe)

    async def counts() -> list[tuple[str, WorkerCounts | None]]:
        return await loop.run_in_executor(threads, deployment.counts)

    async def set_pace(role: str, factor: float) -> None:
        await loop.run_in_executor(threads, deployment.set_pace, role, factor)

    others = [worker.socket_path for worker in deployment.workers[1:]]
    async with TokenClient(deployment.entry.socket_path, others) as client:
        service = ChatService(deployment.model, client, config.gateway)
        app = create_app(service, status, counts, set_pace, threads)
        settings = uvicorn.Config(
            app, log_level="warning", access_log=False, lifespan="off",
            timeout_graceful_shutdown=max(1, math.ceil(config.gateway.drain_s)),
        )  # fmt: skip
        server = _Server(settings, on_ready, service.ending.set)
        watch = asyncio.create_task(_end_when_lost(client, server))
        try:
            await server.serve(sockets=[listener])
        finally:
            watch.cancel()
        if client.lost:
            raise WorkerLost(client.lost, hint="dockyard serve starts it again")


def _threads() -> ReadyThreads:
    """As many as the loop's own, which are started while it serves: for one that is not to be had, all would
    wait."""
    try:
        return ReadyThreads(min(32, (os.cpu_count() or 1) + 4), "gateway")
    except NoThread as error:
        raise ResourceShortage(f"there are no threads for the gateway: {error}") from error


async def _end_when_lost(client: TokenClient, server: uvicorn.Server) -> None:
    """A deployment without one of its workers serves nothing: its owner is told, not left with 503s."""
    await client.until_lost()
    server.should_exit = True


class _Server(uvicorn.Server):
    """Tells when the gateway accepts requests, and when it no longer does."""

    def __init__(
        self, config: uvicorn.Config, on_ready: Callable[[], None], on_end: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._on_ready, self._on_end = on_ready, on_end

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_end()
        await super().shutdown(sockets)


@contextmanager
def _listening(config: DockyardConfig, state: StateFolder | None = None) -> Generator[socket.socket]:
    """The port, taken before anything heavy starts. `state` has those that may hold it."""
    host, port = config.gateway.host, config.gateway.port
    # With the protocol named, asyncio turns Nagle's algorithm off for each connection. Without, the second
    # write of a reply waits for the client's delayed acknowledgement of the first: 40 ms a request.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(128)  # of two that have bound the port at once, this refuses one
        except OSError as error:
            holder = "" if state is None else _holder(state, port)
            raise ResourceShortage(
                f"gateway port {port} on {host}: {error.strerror}{holder and f' by {holder}'}",
                hint=f"{holder and 'end that with `dockyard down`, or '}"
                "choose another with --port, or 0 for a free one",
            ) from error
        yield listener


def _holder(state: StateFolder, port: int) -> str:
    """The deployment of this user's that has the port; empty where it is somebody else."""
    for record in state.records():
        if record.url.endswith(f":{port}") and is_alive(record):
            return f"deployment {record.id} (pid {record.pid}), which serves {record.model}"
    return ""


def _record_ready(state: StateFolder, deployment: Deployment, url: str) -> None:
    pid = os.getpid()
    record = DeploymentRecord(
        id=deployment.id,
        pid=pid,
        started_at=started_at(pid),
        scratch=str(deployment.scratch),
        model=deployment.model.name,
        ready=True,
        url=url,
    )
    state.write(record)
