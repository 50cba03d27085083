"""A gateway before engine workers in this process: everything of the serving path but Ray and processes."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import uvicorn

from actors.counts import worker_counts
from actors.engine_worker import EngineWorker, WorkerFailed
from actors.token_client import TokenClient
from cluster.served import served_model
from engine.config import EngineConfig
from gateway.app import create_app
from gateway.config import GatewayConfig
from gateway.service import ChatService, ServedModel
from protocol.errors import InvalidInput
from protocol.worker_counts import WorkerCounts

PATIENCE_S = 60.0


@dataclass(slots=True)
class Stack:
    """Where it answers, and the workers behind it: the one that takes requests first."""

    url: str
    workers: tuple[EngineWorker, ...]
    paces: dict[str, float] = field(default_factory=dict[str, float])

    def sdk(self) -> openai.OpenAI:
        """A client that does not retry, so that an error shows."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """What another thread does shows up sooner or later; fails after a minute."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"it did not come to: {what}"
            time.sleep(0.01)

    def num_queued(self, worker: EngineWorker) -> int:
        counts = worker.call(lambda: worker.engine.statistics().scheduler)
        return counts.running + counts.waiting

    def wait_until_running(self, count: int = 1) -> None:
        self.wait_until(lambda: sum(map(self.num_queued, self.workers)) >= count, f"{count} running requests")

    def wait_until_idle(self) -> None:
        """Nothing queued, no block held, all books balanced on every worker.

        A client that has hung up may have a request on its way still: each look is one call of the worker.
        """

        def is_idle(worker: EngineWorker) -> bool:
            worker.engine.check_integrity()
            counts = worker.engine.statistics()
            return counts.scheduler.running + counts.scheduler.waiting + counts.pool.held == 0

        for worker in self.workers:
            self.wait_until(lambda worker=worker: worker.call(lambda: is_idle(worker)), "an idle engine")


@contextmanager
def serving(
    model: Path,
    folder: Path,
    *,
    disaggregated: bool = False,
    gateway: GatewayConfig | None = None,
    **engine: Any,
) -> Generator[Stack]:
    """A stack on a free loopback port for the length of the block."""
    settings = {"model": str(model), "threads": 1, "kv_cache_bytes": 8 << 20, **engine}
    with ExitStack() as started:
        if disaggregated:
            decode = _worker({**settings, "role": "decode"}, folder, None, started)
            prefill = _worker({**settings, "role": "prefill"}, folder, decode.adopt, started)
            workers = (prefill, decode)
        else:
            workers = (_worker(settings, folder, None, started),)
        served = served_model("tiny", model, workers[0].engine.max_positions)
        stack = Stack("", workers)
        paths = [_socket(folder, worker.engine.config) for worker in workers]
        stack.url = started.enter_context(_gateway(served, paths, gateway or GatewayConfig(), stack))
        yield stack


def _worker(settings: dict[str, Any], folder: Path, hand_over: Any, started: ExitStack) -> EngineWorker:
    config = EngineConfig.model_validate(settings)
    worker = EngineWorker(config, _socket(folder, config), hand_over)
    worker.start()
    started.callback(worker.stop)
    return worker


def _socket(folder: Path, config: EngineConfig) -> Path:
    return folder / f"{config.role}.sock"


@contextmanager
def _gateway(served: ServedModel, paths: list[Path], config: GatewayConfig, stack: Stack) -> Generator[str]:
    async def status() -> dict[str, Any]:
        return {"workers": [worker.engine.config.role for worker in stack.workers]}

    async def counts() -> list[tuple[str, WorkerCounts | None]]:
        return await asyncio.to_thread(
            lambda: [(worker.engine.config.role, _counts(worker)) for worker in stack.workers]
        )

    async def set_pace(role: str, factor: float) -> None:
        if role not in {worker.engine.config.role for worker in stack.workers}:
            raise InvalidInput(f"no worker {role!r}")
        stack.paces[role] = factor

    async def main() -> None:
        async with TokenClient(paths[0], paths[1:]) as client:
            app = create_app(ChatService(served, client, config), status, counts, set_pace)
            settings = uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=5)
            servers.append(uvicorn.Server(settings))
            ready.set()
            await servers[0].serve(sockets=[listener])

    servers: list[uvicorn.Server] = []
    ready = threading.Event()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        thread = threading.Thread(target=asyncio.run, args=(main(),), name="gateway")
        thread.start()
        assert ready.wait(PATIENCE_S)
        try:
            yield "http://{}:{}".format(*listener.getsockname())
        finally:
            servers[0].should_exit = True
            thread.join()


def _counts(worker: EngineWorker) -> WorkerCounts | None:
    try:
        return worker.call(lambda: worker_counts(worker.engine))
    except WorkerFailed:
        return None
