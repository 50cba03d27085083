"""A worker's books while requests wait for their grammar, before the engine has them."""

from pathlib import Path

import pytest
from tiny_gguf import byte_ids

from actors.engine_worker import EngineWorker
from engine.config import EngineConfig
from engine.request import Request
from protocol.sampling import SamplingParams, Structure
from protocol.wire import Abort, Submit

PROMPT = tuple(byte_ids(b"hello"))


def test_what_waits_for_its_grammar_is_in_the_books(
    tiny_model: Path, tmp_path: Path, cpu_library: Path
) -> None:
    config = EngineConfig(model=str(tiny_model), threads=1, kv_cache_bytes=8 << 20)
    worker = EngineWorker(config, tmp_path / "w.sock")
    worker.start()
    try:
        sampling = SamplingParams(max_tokens=4, structure=Structure("regex", "(ab)+"))
        with worker.engine.sampler.grammars._lock:  # so that the grammar takes its time
            for name in ("c/kept", "c/gone"):
                worker._receive(Submit(name, PROMPT, sampling, 0, 0))
            worker._receive(Abort("c/gone"))
            worker.call(worker.check_integrity)
            assert not worker.call(lambda: worker.engine.requests)
        while worker.call(lambda: bool(worker._compiling) or worker.engine.has_work):
            worker.call(worker.check_integrity)
        worker.call(worker.check_integrity)
        assert worker.call(lambda: worker.engine.statistics().pool.held) == 0
    finally:
        worker.stop()


@pytest.mark.parametrize("leak", ["a request", "an output", "a client"])
def test_the_books_tell_on_what_runs_for_nobody_and_on_who_waits_for_nothing(
    tiny_model: Path, tmp_path: Path, cpu_library: Path, leak: str
) -> None:
    config = EngineConfig(model=str(tiny_model), threads=1, kv_cache_bytes=8 << 20)
    worker = EngineWorker(config, tmp_path / "w.sock")
    worker.start()

    def spoil() -> None:
        worker.engine.add(Request("c/one", PROMPT, SamplingParams(max_tokens=4, ignore_eos=True), choices=2))
        worker._owned["c/one"] = 2
        worker.check_integrity()
        if leak == "a request":
            del worker._owned["c/one"]
        elif leak == "an output":
            worker._owned["c/one"] = 1
        else:
            worker.engine.abort("c/one")
        with pytest.raises(AssertionError, match="outputs of c/one"):
            worker.check_integrity()

    try:
        worker.call(spoil)
    finally:
        worker.stop()
