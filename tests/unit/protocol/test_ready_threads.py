"""An executor's threads are all there at its beginning, and none at its end."""

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn, cast

import pytest
from thread_shortage import WAYS, Way, no_thread, run_short

from protocol.ready_threads import ReadyThreads
from protocol.threads import NoThread, TimelyThread

PATIENCE_S = 20.0  # for what comes at once, or never


def own() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("ready")]


def joined(patches: pytest.MonkeyPatch) -> threading.Semaphore:
    """Counts the waits for an end of a thread, as they begin."""
    join, joins = TimelyThread.join, threading.Semaphore(0)

    def told(thread: TimelyThread, timeout: float | None = None) -> None:
        joins.release()
        join(thread, timeout)

    patches.setattr(TimelyThread, "join", told)
    return joins


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


@pytest.mark.parametrize("way", WAYS)
def test_a_loop_runs_calls_on_it_and_ends_without_a_thread_more(
    monkeypatch: pytest.MonkeyPatch, way: Way
) -> None:
    async def main(pool: ReadyThreads) -> int:
        return await asyncio.get_running_loop().run_in_executor(pool, int, "3")

    with ReadyThreads(2, "ready") as pool, monkeypatch.context() as patches:
        run_short(patches, way)
        assert asyncio.run(main(pool)) == 3
    assert own() == []


def test_asyncio_does_not_take_it_for_its_default() -> None:
    """Which it could not end without a thread more."""

    async def main(pool: ReadyThreads) -> None:
        asyncio.get_running_loop().set_default_executor(cast(ThreadPoolExecutor, pool))

    with ReadyThreads(1, "ready") as pool, pytest.raises(TypeError):
        asyncio.run(main(pool))


def test_several_may_shut_it_down_and_each_waits_for_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever takes out what waits takes out the marks of the end that another has put there."""
    joins = joined(monkeypatch)
    pool, goes_on, begun = ReadyThreads(2, "ready"), threading.Event(), threading.Barrier(3)
    running = [pool.submit(lambda: begun.wait(PATIENCE_S) + goes_on.wait(PATIENCE_S)) for _ in range(2)]
    begun.wait(PATIENCE_S)
    enders = [
        threading.Thread(target=pool.shutdown, kwargs={"cancel_futures": cancels}, daemon=True)
        for cancels in (False, True)
    ]
    for ender in enders:
        ender.start()
        assert joins.acquire(timeout=PATIENCE_S)
    goes_on.set()
    for ender in enders:
        threading.Thread.join(ender, PATIENCE_S)
        assert not ender.is_alive()
    assert all(call.done() for call in running)
    assert own() == []


def test_one_that_is_up_and_has_not_looked_for_work_yet_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joins, looks, taken, done = joined(monkeypatch), threading.Event(), TimelyThread._taken, list[int]()

    def late(thread: TimelyThread) -> Callable[[], object] | None:
        assert looks.wait(PATIENCE_S)
        return taken(thread)

    monkeypatch.setattr(TimelyThread, "_taken", late)
    pool = ReadyThreads(1, "ready")
    pool.submit(done.append, 1)
    ender = threading.Thread(target=pool.shutdown, daemon=True)
    ender.start()
    is_waited_for = joins.acquire(timeout=PATIENCE_S)
    looks.set()
    threading.Thread.join(ender, PATIENCE_S)
    assert (is_waited_for, done) == (True, [1])


def test_who_lets_go_of_it_waits_for_nothing() -> None:
    goes_on, pool = threading.Event(), ReadyThreads(1, "ready")
    (thread,) = own()
    running, waiting = pool.submit(goes_on.wait, PATIENCE_S), pool.submit(int, "5")
    del pool
    assert not running.done()
    goes_on.set()
    assert waiting.result(PATIENCE_S) == 5
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_call_that_failed_keeps_nothing() -> None:
    class Big: ...

    def fail(big: Big) -> NoReturn:
        raise ValueError

    big = Big()
    held = weakref.ref(big)
    gc.disable()
    try:
        with ReadyThreads(1, "ready") as pool:
            failed = pool.submit(fail, big)
            del big
            assert isinstance(failed.exception(PATIENCE_S), ValueError)
            pool.submit(int).result(PATIENCE_S)  # the thread has let go of the one before
            del failed
            assert held() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("step", ["set_running_or_notify_cancel", "set_result", "set_exception"])
def test_what_has_come_of_a_call_is_told_once_there_is_memory(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    real, failures = getattr(Future, step), [MemoryError(), MemoryError()]

    def short(future: Future[object], *told: object) -> object:
        if failures:
            raise failures.pop()
        return real(future, *told)

    with ReadyThreads(1, "ready") as pool:
        monkeypatch.setattr(Future, step, short)
        text = "x" if step == "set_exception" else "1"
        outcome = pool.submit(int, text).exception(PATIENCE_S)
        expected = {"set_exception": ValueError, "set_result": type(None)}.get(step, MemoryError)
        assert isinstance(outcome, expected)
        failures.clear()
        assert pool.submit(int, "2").result(PATIENCE_S) == 2


def test_none_stays_behind_an_interrupt_whenever_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    wait, left = TimelyThread.wait, [2]

    def interrupted(thread: TimelyThread) -> None:
        wait(thread)
        left[0] -= 1
        if not left[0]:
            while not thread.has_begun:
                wait(thread)
            raise KeyboardInterrupt

    monkeypatch.setattr(TimelyThread, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ReadyThreads(3, "ready")
    assert own() == []


AT_EXIT = """
import threading
from protocol.ready_threads import ReadyThreads

def late():
    threading.main_thread().join()  # which is behind its last line
    print("done")

pool = ReadyThreads(2, "ready")
pool.submit(late)
"""


@pytest.mark.parametrize("last", ["", "del pool"])
def test_a_process_ends_behind_what_was_asked_for(last: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT + last], capture_output=True, text=True, timeout=60, check=True,
        cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("done\n", "")
