"""Calls that block, for asyncio: each in a thread of its own, and what has to be done though a task is
cancelled."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Never, ParamSpec, TypeVar

from protocol.threads import NoThread, TimelyThread
from sandbox.errors import CapacityError
from sandbox.missing_threads import shortage

P = ParamSpec("P")
T = TypeVar("T")

_LOOK_S = 0.05  # how often it is looked whether a thread is up


def in_thread(call: Callable[[], T], *, at_any_rate: bool = False) -> "Future[T]":
    """A thread of its own instead of the loop's pool: that has few threads, and a sandbox that is to be
    killed must not wait for others that are being made. For the loop's thread, which does not wait for that
    one to come up. Where it does not, this is CapacityError, or is done by the loop's own `at_any_rate`."""
    future: Future[T] = Future()
    work = partial(settle, future, call)
    instead = work if at_any_rate else partial(settle, future, _refuse)
    thread = TimelyThread(work, name="dockyard-sandbox")
    _Beginning(thread, instead, is_patient=not at_any_rate).begin()
    return future


def _refuse() -> Never:
    raise CapacityError("sandbox: no thread came up for it", hint="raise `ulimit -u`, or end something")


class _Beginning:
    """Of a thread, which the loop looks for now and then. For the loop's thread."""

    def __init__(self, thread: TimelyThread, instead: Callable[[], None], *, is_patient: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread, self._instead = thread, instead
        self._is_patient, self._begun_s = is_patient, time.monotonic()

    def begin(self) -> None:
        looking = self._loop.call_later(_LOOK_S, self._look)
        try:
            self._thread.begin()
        except BaseException as error:
            looking.cancel()
            if not isinstance(error, NoThread):
                self._thread.take_back()
                raise
            self._instead()

    def _look(self) -> None:
        if self._thread.has_begun:
            shortage.relieve()
            return
        if not self._is_lost():
            with suppress(MemoryError):  # for which nobody could look again
                self._loop.call_later(_LOOK_S, self._look)
                return
        if self._thread.take_back() is not None:
            shortage.tell()
            self._instead()

    def _is_lost(self) -> bool:
        if self._is_patient:
            return self._thread.is_lost
        return shortage.has_lost(self._thread, self._begun_s)


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
        return in_thread(call, at_any_rate=True)
    except MemoryError:
        done: Future[T] = Future()
        settle(done, call)
        return done
