"""What asyncio code has to have done though it is cancelled, or no thread can be had for it."""

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

import pytest
from thread_shortage import run_short

from sandbox import aio_threads
from sandbox.aio import _made_or_undone
from sandbox.aio_threads import awaited, outlasted, threaded, uncancelled
from sandbox.errors import CapacityError
from sandbox.missing_threads import Shortage

UNDO_FAILS = OSError("held on to")


def run_quietly(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """In a loop that has nothing to complain of."""
    complaints: list[dict[str, Any]] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, about: complaints.append(about))
        await work()
        gc.collect()  # asyncio complains of what goes, and was not heard

    asyncio.run(watched())
    assert complaints == []


async def cancelled(work: Coroutine[Any, Any, object], between: Callable[[], object]) -> BaseException | None:
    """The cause that a task's cancellation has. `between`: done once that is under way, a second one."""
    task = asyncio.ensure_future(work)
    for _ in range(2):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    between()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    return caught.value.__cause__


def fail(made: object) -> None:
    del made
    raise UNDO_FAILS


def test_what_has_to_be_done_is_done_by_the_loops_thread_where_there_is_no_other(
    shortage: pytest.MonkeyPatch,
):
    async def work() -> None:
        assert await uncancelled(threading.current_thread) is threading.main_thread()
        with pytest.raises(OSError, match="held on to"):
            await uncancelled(lambda: fail(1))
        shortage.undo()
        assert await uncancelled(threading.current_thread) is not threading.main_thread()

    run_quietly(work)


def test_after_a_thread_that_was_missing_nothing_that_has_to_be_done_waits_as_long(
    monkeypatch: pytest.MonkeyPatch,
):
    missing = Shortage()
    missing.tell()
    monkeypatch.setattr(aio_threads, "shortage", missing)
    run_short(monkeypatch, "dead", up_s=3600.0)

    async def work() -> None:
        async with asyncio.timeout(10):
            assert await uncancelled(threading.current_thread) is threading.main_thread()

    run_quietly(work)


@pytest.mark.parametrize("how", [threaded, uncancelled])
def test_a_loop_goes_on_while_a_thread_does_not_come_up(how: Any, monkeypatch: pytest.MonkeyPatch):
    run_short(monkeypatch, "dead", up_s=0.5)
    turns = [0]

    async def work() -> None:
        task = asyncio.ensure_future(how(lambda: turns[0]))
        while not task.done():
            turns[0] += 1
            await asyncio.sleep(0)
        if how is threaded:
            with pytest.raises(CapacityError, match="no thread came up"):
                await task
        else:
            assert await task > 10
        assert turns[0] > 10

    run_quietly(work)


def test_what_is_made_behind_a_cancellation_is_undone_without_a_thread(shortage: pytest.MonkeyPatch):
    del shortage
    undone: list[int] = []

    async def work() -> None:
        pending: Future[int] = Future()
        cause = await cancelled(_made_or_undone(pending, undone.append), lambda: pending.set_result(3))
        assert (cause, undone) == (None, [3])

    run_quietly(work)


def test_a_cancellation_stays_what_is_raised_when_the_undoing_fails():
    async def work() -> None:
        pending: Future[int] = Future()
        cause = await cancelled(_made_or_undone(pending, fail), lambda: pending.set_result(3))
        assert cause is UNDO_FAILS

    run_quietly(work)


def test_a_cancellation_stays_what_is_raised_when_nothing_was_made():
    async def work() -> None:
        pending: Future[int] = Future()
        await cancelled(_made_or_undone(pending, fail), lambda: pending.set_exception(OSError("not made")))

    run_quietly(work)


def test_what_fails_when_nobody_waits_for_it_any_more_is_no_complaint():
    async def work() -> None:
        pending: Future[int] = Future()
        await cancelled(awaited(pending), lambda: None)
        pending.set_exception(OSError("nobody hears of it"))
        await outlasted(pending)

    run_quietly(work)


def test_what_fails_behind_a_cancellation_is_its_cause_and_no_complaint():
    async def work() -> None:
        may_end = threading.Event()

        def end() -> None:
            may_end.wait()
            fail(1)

        assert await cancelled(uncancelled(end), may_end.set) is UNDO_FAILS

    run_quietly(work)


def test_what_is_waited_for_without_a_thread_outlasts_every_cancellation(shortage: pytest.MonkeyPatch):
    del shortage

    async def work() -> None:
        pending: Future[int] = Future()
        waiting = asyncio.ensure_future(outlasted(pending))
        for _ in range(5):
            await asyncio.sleep(0)
            waiting.cancel()
        await asyncio.sleep(0)
        assert not waiting.done()
        pending.set_exception(OSError("ended badly"))
        assert isinstance(await waiting, asyncio.CancelledError)

    run_quietly(work)
