"""A client that leaves while its prompt runs: the step ends between two stages, over the real socket."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

from actors.engine_worker import EngineWorker
from actors.token_client import TokenClient
from engine.config import EngineConfig
from engine.model.stages import Stage, StageClock
from protocol.sampling import SamplingParams
from protocol.wire import Tokens

GOLDEN = Path(__file__).parents[2] / "data" / "v41_golden" / "a"
IDS: list[int] = json.loads((GOLDEN / "ids.json").read_text())
PATIENCE_S = 60.0


class Waiting(StageClock):
    """Behind the first encoder it waits for somebody to interrupt the step."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.told = threading.Event(), threading.Event()

    def passed(self, stage: Stage) -> None:
        if stage == "encoder" and not self.reached.is_set():
            self.reached.set()
            assert self.told.wait(PATIENCE_S), "nobody has interrupted the step"
        super().passed(stage)

    def interrupt(self) -> None:
        super().interrupt()
        self.told.set()


def test_the_step_of_a_client_that_leaves_ends_early(tmp_path: Path, cpu_library: Path) -> None:
    config = EngineConfig(model=str(GOLDEN), threads=1, kv_cache_bytes=1 << 20)
    worker = EngineWorker(config, tmp_path / "engine.sock")
    worker.start()
    try:
        clock = Waiting()
        worker.engine.state.stages = clock  # pyright: ignore[reportAttributeAccessIssue]
        asyncio.run(_leave(tmp_path / "engine.sock", clock))
        counts = worker.call(worker.engine.statistics)
        assert (counts.stages.interrupted, counts.steps, counts.pool.held) == (1, 0, 0)
        worker.call(worker.check_integrity)
        assert asyncio.run(_run(tmp_path / "engine.sock")) == 3
    finally:
        worker.stop()


async def _leave(socket: Path, clock: Waiting) -> None:
    async with TokenClient(socket) as client, aclosing(_asked(client)) as stream:
        reading = asyncio.ensure_future(anext(stream))
        assert await asyncio.to_thread(clock.reached.wait, PATIENCE_S)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert await asyncio.to_thread(clock.told.wait, PATIENCE_S)


async def _run(socket: Path) -> int:
    async with TokenClient(socket) as client, aclosing(_asked(client)) as stream:
        return sum([len(batch.token_ids) async for batch in stream])


def _asked(client: TokenClient) -> AsyncGenerator[Tokens]:
    return client.generate(IDS[:60], SamplingParams(max_tokens=3, ignore_eos=True))
