"""The thread that reads tables which are not in memory, beside the layers that run."""

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from torch import Tensor

from protocol.errors import ResourceShortage
from protocol.threads import NoThread, TimelyThread

_Work = Callable[[], None]


class TableReader:
    """Does one look-up after another. Its thread is there from the beginning, so no step starts one, and ends
    with it. For one thread at a time."""

    def __init__(self) -> None:
        """Raises ResourceShortage where no thread is to be had."""
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        thread = TimelyThread(partial(_do, self._work), name="engram")
        try:
            thread.start()
        except NoThread as error:
            raise ResourceShortage(f"there is no thread that reads the Engram tables: {error}") from error
        self.close = weakref.finalize(self, _end, self._work, thread)
        """Ends the thread behind what was asked for, and waits for that. Idempotent."""

    def begin(self, look_up: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """What waits for the look-up, and returns its rows or raises what it raises."""
        assert self.close.alive, "the tables' thread has ended"
        found: Future[Tensor] = Future()
        self._work.put(partial(_settle, found, look_up))
        return found.result


def _do(work: "queue.SimpleQueue[_Work | None]") -> None:
    while (one := work.get()) is not None:
        one()
        del one  # what it holds is not this thread's to keep


def _settle(found: "Future[Tensor]", look_up: Callable[[], Tensor]) -> None:
    try:
        found.set_result(look_up())
    except BaseException as error:  # handed to whoever waits
        found.set_exception(error)


def _end(work: "queue.SimpleQueue[_Work | None]", thread: threading.Thread) -> None:
    work.put(None)
    if thread is not threading.current_thread():  # on which a collector may have found it
        thread.join()
