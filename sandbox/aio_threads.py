"""Calls that block, for asyncio: each in a thread of its own, and what has to be done though a task is
cancelled."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import ParamSpec, TypeVar

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
    return await asyncio.shield(asyncio.wrap_future(in_thread(partial(call, *args, **options))))


async def uncancelled(call: Callable[[], T]) -> T:
    """Runs a clean-up to its end even when the task is cancelled (again) meanwhile; the cancellation
    follows."""
    work = asyncio.ensure_future(threaded(call))
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return work.result()
