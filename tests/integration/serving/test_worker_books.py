"""A worker's books while requests wait for their grammar, before the engine has them."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tiny_gguf import byte_ids

from actors.engine_worker import EngineWorker
from engine.config import EngineConfig
from engine.errors import Overloaded
from engine.request import Request
from protocol.sampling import SamplingParams, Structure
from protocol.wire import Abort, Failed, Submit

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


@pytest.fixture
def worker(tiny_model: Path, tmp_path: Path, cpu_library: Path) -> Iterator[EngineWorker]:
    config = EngineConfig(model=str(tiny_model), threads=1, kv_cache_bytes=8 << 20)
    made = EngineWorker(config, tmp_path / "w.sock")
    made.start()
    yield made
    made.stop()


def asked(worker: EngineWorker, name: str, structure: Structure) -> None:
    worker._receive(Submit(name, PROMPT, SamplingParams(max_tokens=4, structure=structure), 0, 0))


def settled(worker: EngineWorker) -> None:
    while worker.call(lambda: bool(worker._compiling) or worker.engine.has_work):
        worker.call(worker.check_integrity)
    worker.call(worker.check_integrity)


def only_elsewhere(worker: EngineWorker, patch: pytest.MonkeyPatch) -> list[str]:
    """Threads in which grammars are compiled."""
    grammars, threads = worker.engine.sampler.grammars, list[str]()
    compile_one = grammars._compile

    def compiled(structure: Structure) -> object:
        threads.append(threading.current_thread().name)
        return compile_one(structure)

    patch.setattr(grammars, "_compile", compiled)
    return threads


def test_a_grammar_that_is_given_up_at_once_is_not_compiled_by_the_engine(
    worker: EngineWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look for it and the queue, by another thread: known, and behind `prepare`."""
    threads, engine = only_elsewhere(worker, monkeypatch), worker.engine
    add = engine.add

    def added(*arguments: Any) -> None:
        engine.sampler.grammars._compiled.clear()
        add(*arguments)

    monkeypatch.setattr(engine, "add", added)
    asked(worker, "c/1", Structure("regex", "(ab)+"))
    settled(worker)
    worker.call(lambda: engine.sampler.grammars.compile(Structure("regex", "(cd)+")))
    before = len(threads)
    asked(worker, "c/2", Structure("regex", "(cd)+"))
    settled(worker)
    assert threads[0] != "engine"
    assert len(threads) == before


@pytest.mark.parametrize(
    ("raised", "code"),
    [(Overloaded("too many"), "overloaded"), (MemoryError(), "overloaded"), (KeyError("bug"), "internal")],
)
def test_a_grammar_that_does_not_come_ends_its_request_alone(
    worker: EngineWorker, monkeypatch: pytest.MonkeyPatch, raised: Exception, code: str
) -> None:
    """There may be room a moment later; the engine's thread must not take it to compile."""
    told: list[Failed] = []
    monkeypatch.setattr(worker._server, "send", told.extend)
    grammars, compile_one = worker.engine.sampler.grammars, worker.engine.sampler.grammars._compile
    threads: list[str] = []

    def fail_once(structure: Structure) -> object:
        threads.append(threading.current_thread().name)
        if len(threads) == 1:
            raise raised
        return compile_one(structure)

    monkeypatch.setattr(grammars, "_compile", fail_once)
    asked(worker, "c/1", Structure("regex", "(ab)+"))
    settled(worker)
    assert [(message.request_id, message.code) for message in told] == [("c/1", code)]
    assert len(threads) == 1
    assert "engine" not in threads


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


def test_without_a_thread_for_grammars_a_request_is_refused_and_leaves_nothing(
    worker: EngineWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the worker's loop."""

    def no_thread(*arguments: object) -> NoReturn:
        raise RuntimeError("can't start new thread")

    refused: dict[str, BaseException] = {}
    monkeypatch.setattr(worker, "refuse", refused.__setitem__)
    with monkeypatch.context() as patch:
        patch.setattr("_thread.start_new_thread", no_thread)
        asked(worker, "c/a", Structure("regex", "(ab)+"))
        settled(worker)
    assert {name: type(error) for name, error in refused.items()} == {"c/a": Overloaded}
    assert not worker.call(lambda: worker._owned)
    asked(worker, "c/b", Structure("regex", "(ab)+"))
    settled(worker)
    assert refused.keys() == {"c/a"}
