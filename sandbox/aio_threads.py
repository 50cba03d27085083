"""Calls that block, for asyncio: each in a thread of its own, and what has to be done though a task is
cancelled."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, ParamSpec, TypeVar

from protocol.threads import NoThread, TimelyThread
from sandbox.errors import CapacityError

P = ParamSpec("P")
T = TypeVar("T")


def in_thread(call: Callable[[], T]) -> "Future[T]":
    """A thread of its own instead of the loop's pool: that has few threads, and a sandbox that is to be
    killed must not wait for others that are being made."""
    future: Future[T] = Future()
    try:
        TimelyThread(partial(settle, future, call), name="dockyard-sandbox").start()
    except NoThread as error:
        raise CapacityError(f"sandbox: {error}", hint="raise `ulimit -u`, or end something") from error
    return future


def settle(future: "Future[T]", call: Callable[[], T]) -> None:
    """Its result, or what it raises."""
    try:
        future.set_result(call())
    except BaseException as error:  # handed to whoever waits, the reader of the future
        future.set_exception(error)


async def threaded(call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """The call's result. When cancelled, the call goes on to its end."""
    return await awaited(in_thread(partial(call, *args, **options)))


async def awaited(work: "Future[T]") -> T:
    """Its result. When cancelled, it goes on, and nobody hears of what it raises."""
    return await asyncio.shield(_waiting(work))


async def uncancelled(call: Callable[[], T], behind: asyncio.CancelledError | None = None) -> T:
    """Runs what has to be done to its end, even when the task is cancelled (again) meanwhile: on the loop's
    own thread, which stands still for moments, where no other can be had. The cancellation follows, or the
    one that this is `behind`, whatever became of the call: that is its cause then."""
    work = _begun(call)
    try:
        cancelled = await outlasted(work) or behind
        if cancelled is not None:
            raise cancelled from work.exception()
        return work.result()
    finally:
        cancelled = behind = None  # or they would keep themselves


async def outlasted(work: "Future[Any]") -> asyncio.CancelledError | None:
    """Waits until it is done even when the task is cancelled meanwhile, and returns the last cancellation,
    which is the caller's to raise. Needs no thread."""
    waiting = _waiting(work)
    cancelled: asyncio.CancelledError | None = None
    try:
        while not waiting.done():
            try:
                await asyncio.wait((waiting,))
            except asyncio.CancelledError as error:
                cancelled = error
        return cancelled
    finally:
        cancelled = None


def _waiting(work: "Future[T]") -> "asyncio.Future[T]":
    waiting = asyncio.wrap_future(work)
    waiting.add_done_callback(take_error)
    return waiting


def take_error(ended: "asyncio.Future[Any]") -> None:
    """Of a future for which nobody may wait any more: asyncio would complain of it."""
    if not ended.cancelled():
        ended.exception()


def _begun(call: Callable[[], T]) -> "Future[T]":
    """Better late for all others than not done."""
    try:
        return in_thread(call)
    except (CapacityError, MemoryError):
        done: Future[T] = Future()
        settle(done, call)
        return done
