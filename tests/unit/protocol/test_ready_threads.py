"""An executor's threads are all there at its beginning, and none at its end."""

import asyncio
import gc
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError

import pytest
from thread_shortage import no_thread, run_short

from protocol.ready_threads import ReadyThreads
from protocol.threads import NoThread

PATIENCE_S = 20.0  # for what comes at once, or never


def own() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("ready")]


def test_they_are_there_at_once_and_gone_at_the_end() -> None:
    with ReadyThreads(3, "ready") as pool:
        assert sorted(thread.name for thread in own()) == ["ready_0", "ready_1", "ready_2"]
        together = threading.Barrier(3)
        list(pool.map(lambda _: together.wait(PATIENCE_S), range(3)))
        assert list(pool.map(lambda n: n + 1, range(100))) == list(range(1, 101))
    assert own() == []
    pool.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        pool.submit(int)


def test_no_call_starts_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with ReadyThreads(2, "ready") as pool, monkeypatch.context() as patches:
        run_short(patches, "none")
        assert pool.submit(int, "7", base=8).result(PATIENCE_S) == 7


def test_without_threads_there_is_none(shortage: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoThread):
        ReadyThreads(2, "ready")
    assert own() == []


def test_those_that_are_up_end_where_the_next_is_not_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    import _thread

    begin, left = _thread.start_new_thread, [2]

    def few(function: Callable[[], object], arguments: tuple[()]) -> int:
        left[0] -= 1
        return begin(function, arguments) if left[0] >= 0 else no_thread()

    monkeypatch.setattr("_thread.start_new_thread", few)
    with pytest.raises(NoThread, match="can't start new thread"):
        ReadyThreads(3, "ready")
    assert own() == []


def test_what_fails_fails_who_waits_for_it_alone() -> None:
    with ReadyThreads(1, "ready") as pool:
        bad, good = pool.submit(int, "x"), pool.submit(int, "1")
        with pytest.raises(ValueError, match="invalid literal"):
            bad.result(PATIENCE_S)
        assert good.result(PATIENCE_S) == 1


def test_what_is_cancelled_is_not_done_and_the_next_is() -> None:
    goes_on, done = threading.Event(), list[int]()
    with ReadyThreads(1, "ready") as pool:
        pool.submit(goes_on.wait, PATIENCE_S)
        given_up, wanted = pool.submit(done.append, 1), pool.submit(done.append, 2)
        assert given_up.cancel()
        goes_on.set()
        wanted.result(PATIENCE_S)
    assert done == [2]


def test_a_shutdown_that_does_not_wait_cancels_what_waits() -> None:
    goes_on, pool = threading.Event(), ReadyThreads(1, "ready")
    (thread,) = own()
    begun = threading.Event()
    running = pool.submit(lambda: begun.set() or goes_on.wait(PATIENCE_S))
    assert begun.wait(PATIENCE_S)
    waiting = pool.submit(int)
    pool.shutdown(wait=False, cancel_futures=True)
    with pytest.raises(CancelledError):
        waiting.result(PATIENCE_S)
    goes_on.set()
    assert running.result(PATIENCE_S)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_they_end_with_one_that_nobody_has_shut_down() -> None:
    pool = ReadyThreads(2, "ready")
    threads = own()
    del pool
    gc.collect()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert own() == []


def test_a_loop_that_has_it_needs_no_thread_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> int:
        asyncio.get_running_loop().set_default_executor(ReadyThreads(2, "ready"))
        with monkeypatch.context() as patches:
            run_short(patches, "its own dead")
            return await asyncio.wait_for(asyncio.to_thread(int, "3"), PATIENCE_S)

    assert asyncio.run(main()) == 3
    assert own() == []
