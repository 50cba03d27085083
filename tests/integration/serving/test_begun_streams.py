"""A stream that another worker has begun goes on through a client: its first token is the one behind."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from tiny_gguf import byte_ids

from actors.engine_worker import EngineWorker
from actors.token_client import TokenClient
from engine.config import EngineConfig
from protocol.sampling import SamplingParams

PATIENCE_S = 60.0
SAMPLING = SamplingParams(max_tokens=9, temperature=0.8, seed=3, ignore_eos=True)
PROMPT = byte_ids(b"hello the world")


@pytest.mark.parametrize("disaggregated", [False, True], ids=["one worker", "prefill and decode"])
def test_a_begun_stream_goes_on_with_the_same_tokens(
    tiny_model: Path, tmp_path: Path, cpu_library: Path, disaggregated: bool
) -> None:
    settings = {"model": str(tiny_model), "threads": 1, "kv_cache_bytes": 8 << 20}
    workers: list[EngineWorker] = []
    for role in ("decode", "prefill") if disaggregated else ("both",):
        config = EngineConfig.model_validate({**settings, **({"role": role} if disaggregated else {})})
        workers.insert(
            0, EngineWorker(config, tmp_path / f"{len(workers)}.sock", *[w.adopt for w in workers])
        )
    paths = [tmp_path / f"{number}.sock" for number in reversed(range(len(workers)))]
    try:
        for worker in workers:
            worker.start()
        asyncio.run(asyncio.wait_for(_compare(paths), PATIENCE_S))
        for worker in workers:
            worker.call(worker.check_integrity)
    finally:
        for worker in workers:
            worker.stop()


async def _compare(paths: Sequence[Path]) -> None:
    async with TokenClient(paths[0], paths[1:]) as client:
        whole = await _tokens(client)
        assert len(whole) == SAMPLING.max_tokens
        for begun in (1, 4, 8):
            assert await _tokens(client, whole[:begun]) == whole[begun:]


async def _tokens(client: TokenClient, begun: Sequence[int] = ()) -> list[int]:
    generated = client.generate(PROMPT, SAMPLING, generated_ids=begun)
    return [token async for batch in generated for token in batch.token_ids]
