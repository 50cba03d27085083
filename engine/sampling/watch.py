"""Calls that may take minutes, each watched: the one who waits gives up on it, since nothing stops it.

A grammar's matcher is a C++ library's, which lets other threads run meanwhile and cannot be interrupted. Its
calls run in a thread of their own. One that has had its time of the processor is given up with its thread,
which works on to its end and answers nobody. (Where that end comes while the interpreter's does, the process
aborts: a thread that Python stops cannot be unwound through C++.)
"""

import queue
import threading
import time
from collections.abc import Callable

from engine.errors import Overloaded
from engine.sampling.thread_start import start_thread
from protocol.threads import TimelyThread

_LOOK_S = 0.05  # how often a call that takes its time is looked at
_MOST_LOST = 4  # threads that have been given up and still work


class TooSlow(Exception):
    """A call has been given up."""


class Watch:
    """Owned by one thread, and whoever it calls for; `start` is anybody's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: _Thread | None = None
        self._lost: list[_Thread] = []

    def run(self, work: Callable[[], bool], most_s: float) -> tuple[bool, float]:
        """The answer and the processor's time that it took. Raises TooSlow past `most_s` of that time,
        Overloaded where no thread can be had for it, and what `work` raises. Blocks meanwhile."""
        self.start()
        assert self._thread is not None
        try:
            answer = self._thread.answer(work, most_s)
        except BaseException:  # TooSlow, Ctrl-C, no memory: its answer would be taken for another call's
            with self._lock:
                self._thread.end()
                self._lost.append(self._thread)
                self._thread = None
            raise
        if isinstance(answer, Exception):
            raise answer
        return answer

    def start(self) -> None:
        """Have a thread at hand, as `run` does where there is none. Raises Overloaded; blocks for seconds
        where there is hardly any memory."""
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                return
            self._lost = [thread for thread in self._lost if thread.is_alive()]
            if len(self._lost) >= _MOST_LOST:
                raise Overloaded("grammars that were given up are still at work", hint="try again in a while")
            thread = _Thread()
            start_thread(thread)
            self._thread = thread

    def close(self) -> None:
        """End the thread once its call has ended; does not wait for it."""
        if self._thread is not None:
            self._thread.end()
            self._thread = None


class _Thread(TimelyThread):
    def __init__(self) -> None:
        super().__init__(self._work_off, name="grammar-matcher")  # the process ends without it
        self._calls: queue.SimpleQueue[Callable[[], bool] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[bool, float] | Exception] = queue.SimpleQueue()
        self._began_s = 0.0  # on the thread's own clock

    def _work_off(self) -> None:
        while (work := self._calls.get()) is not None:
            self._answers.put(self._timed(work))
            del work  # it holds the matcher

    def answer(self, work: Callable[[], bool], most_s: float) -> tuple[bool, float] | Exception:
        self._began_s = self._clock_s()
        self._calls.put(work)
        while True:
            try:
                return self._answers.get(timeout=_LOOK_S)
            except queue.Empty:
                if not self.is_alive():  # no memory for its answer
                    raise MemoryError("a grammar's thread has ended") from None
                if self._clock_s() - self._began_s > most_s:
                    raise TooSlow(f"more than {most_s:g} s for one token") from None

    def end(self) -> None:
        self._calls.put(None)

    def _timed(self, work: Callable[[], bool]) -> tuple[bool, float] | Exception:
        try:
            return work(), time.thread_time() - self._began_s
        except Exception as error:  # whatever it is, the one who waits is told
            return error

    def _clock_s(self) -> float:
        assert self.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self.ident))
