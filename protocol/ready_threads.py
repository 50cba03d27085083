"""An executor whose threads are there before anybody needs them.

`ThreadPoolExecutor` starts a thread at a call, where there may be none, or no end of waiting for it: see
`protocol.threads`. It is not for asyncio's default executor: to end that, a loop starts a thread
(`shutdown_default_executor`). Give it to `run_in_executor`, and end it outside of the loop.
"""

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar

from protocol.threads import TimelyThread

P = ParamSpec("P")
T = TypeVar("T")
_Calls = queue.SimpleQueue[tuple[Future[Any], Callable[[], object]] | None]

_AGAIN_S = 0.01  # between tries to say what has come of a call, which takes memory


class ReadyThreads(Executor):
    """Does what it is asked for, begun in that order, with `count` threads, which no call ends.

    Its threads end with `shutdown`, and so with a block of `with`; with this object, when nobody has it any
    more, which waits for nothing; or with the process, which waits. Each time behind what was asked for. A
    forked child has none of them.
    """

    def __init__(self, count: int, name: str) -> None:
        """Blocks until all are up. NoThread where they cannot be had; then none stays, nor behind what a
        signal's handler raises."""
        self._calls: _Calls = queue.SimpleQueue()
        self._gate = threading.Lock()  # nothing comes in behind the end
        self._is_closed = False
        self._workers = [_Worker(self._calls, f"{name}_{number}") for number in range(count)]
        weakref.finalize(self, _end, self._calls, count).atexit = False
        try:
            for worker in self._workers:
                worker.start()
        except BaseException:
            self.shutdown()
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
        """May be called again, and by several at once: each that waits returns when all threads have ended.
        One of these threads itself cannot wait, which is a RuntimeError."""
        with self._gate:
            self._is_closed = True
        if cancel_futures:
            with suppress(queue.Empty):
                while True:
                    if (waiting := self._calls.get_nowait()) is not None:
                        waiting[0].cancel()
        _end(self._calls, len(self._workers))  # always: others' marks may just have been taken out
        if wait:
            _join(self._workers)


class _Worker(TimelyThread):
    def __init__(self, calls: _Calls, name: str) -> None:
        super().__init__(partial(_work_off, calls), name=name)
        self.calls = calls


def _work_off(calls: _Calls) -> None:
    while (one := calls.get()) is not None:
        _settle(*one)
        del one  # what it holds is not this thread's to keep


def _settle(future: Future[Any], call: Callable[[], object]) -> None:
    """Raises nothing: its thread has others to serve."""
    result = failure = None
    try:
        if not future.set_running_or_notify_cancel():
            return
        result = call()
    except BaseException as error:  # handed to whoever waits
        failure = error
    while not future.done():
        try:
            if failure is None:
                future.set_result(result)
            else:
                future.set_exception(failure)
        except BaseException:  # no memory, say: later there is some
            time.sleep(_AGAIN_S)
    del future, call, failure  # an error's traceback has this frame, and would keep them and itself


def _end(calls: _Calls, count: int) -> None:
    for _ in range(count):
        calls.put(None)


def _join(workers: list[_Worker]) -> None:
    for worker in workers:
        if worker.is_alive():  # none that never came up
            worker.join()


def _end_with_process() -> None:
    """A daemon's thread that the interpreter ends within a library's code would take the process along."""
    workers = [thread for thread in threading.enumerate() if isinstance(thread, _Worker)]
    for worker in workers:
        worker.calls.put(None)
    _join(workers)


atexit.register(_end_with_process)
