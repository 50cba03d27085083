"""An executor whose threads are there before anybody needs them.

`ThreadPoolExecutor` starts a thread at a call, where there may be none, or no end of waiting for it: see
`protocol.threads`.
"""

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar

from protocol.threads import TimelyThread

P = ParamSpec("P")
T = TypeVar("T")
_Calls = queue.SimpleQueue[tuple[Future[Any], Callable[[], object]] | None]


class ReadyThreads(ThreadPoolExecutor):
    """As that, which asyncio wants for its loop's default. Its threads end with `shutdown`, with this object,
    or with the process, behind what was asked for."""

    def __init__(self, count: int, name: str) -> None:
        """Blocks until all are up. NoThread where they cannot be had; then none stays."""
        super().__init__(count, name)
        self._calls: _Calls = queue.SimpleQueue()
        self._gate = threading.Lock()  # nothing comes in behind the end
        self._is_closed = False
        running: list[threading.Thread] = []
        self._finish = weakref.finalize(self, _finish, self._calls, running)
        try:
            for number in range(count):
                thread = TimelyThread(partial(_work_off, self._calls), name=f"{name}_{number}")
                thread.start()
                running.append(thread)
        except BaseException:
            self._finish()
            raise

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Raises RuntimeError after `shutdown`."""
        future: Future[T] = Future()
        with self._gate:
            if self._is_closed:
                raise RuntimeError("these threads have been shut down")
            self._calls.put((future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Idempotent."""
        with self._gate:
            self._is_closed = True
        if cancel_futures:
            with suppress(queue.Empty):
                while True:
                    if (waiting := self._calls.get_nowait()) is not None:
                        waiting[0].cancel()
        if wait:
            self._finish()
        else:
            for _ in range(self._max_workers):
                self._calls.put(None)


def _work_off(calls: _Calls) -> None:
    while (one := calls.get()) is not None:
        _settle(*one)
        del one  # what it holds is not this thread's to keep


def _settle(future: Future[Any], call: Callable[[], object]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except BaseException as error:  # handed to whoever waits
        future.set_exception(error)


def _finish(calls: _Calls, running: Sequence[threading.Thread]) -> None:
    for _ in running:
        calls.put(None)
    for thread in running:
        if thread is not threading.current_thread():  # on which a collector may have found them
            thread.join()
