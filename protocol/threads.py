"""Threads that are up within seconds, or never.

`threading.Thread.start` returns once the new thread runs Python. One that finds no memory for its first steps
ends without a word (CPython 3.11 under RLIMIT_AS, or in a cgroup that is full), and whoever has started it
waits for ever: a service's loop, with all that it serves.
"""

import _thread
import sys
import threading
import time
from collections.abc import Callable

_UP_S = 5.0  # a machine under load takes milliseconds


class NoThread(RuntimeError):
    """None can be had. A RuntimeError, as `threading.Thread.start` raises where the system says so."""


class TimelyThread(threading.Thread):
    """Runs `work` once, or never: not when it comes up after whoever started it has given up.

    One that never comes up stays in `threading.enumerate` and `active_count` until the process ends: only
    what comes up is taken out there, and nobody knows that it will not. That is a few kilobytes, without its
    work, for each that was given up.
    """

    def __init__(self, work: Callable[[], object], *, name: str, daemon: bool = True) -> None:
        super().__init__(name=name, daemon=daemon)
        self._work = [work]  # whoever takes it out does it
        self._is_given_up = False
        self._settled = threading.Event()  # it is up, or known not to come up
        self._failure: Exception | None = None
        self._late_s = 0.0

    def start(self) -> None:
        """Blocks until it is up, seconds at most. NoThread, and then it is of no use; RuntimeError the second
        time. Behind what a signal's handler raises here `has_begun` says whether it runs all the same: if it
        was not up yet, it never will."""
        self.begin()
        try:
            self.wait()
        except BaseException:
            self.take_back()
            raise
        if self.is_lost and self.take_back() is not None:
            raise NoThread(self._why()) from self._failure

    def begin(self) -> None:
        """As `start`, and waits for nothing: whoever calls it looks whether it comes up. NoThread where the
        system says so at once; RuntimeError the second time."""
        if self._late_s or self._is_given_up:
            raise RuntimeError(f"thread {self.name!r} was started before, or given up")
        self._late_s = time.monotonic() + _UP_S
        try:
            # Whoever calls `Thread.start` may wait for ever: a thread for which nobody waits, so it is none.
            _thread.start_new_thread(self._start, ())
        except (MemoryError, RuntimeError) as error:
            self._failure = error
            self.take_back()
            raise NoThread(self._why()) from error
        except BaseException:  # what a signal's handler raises
            self.take_back()
            raise

    def wait(self) -> None:
        """Blocks until it has begun or is lost."""
        self._settled.wait(max(0.0, self._late_s - time.monotonic()))

    @property
    def is_lost(self) -> bool:
        """Whether it will not come up, or has not for seconds."""
        return not self.has_begun and (self._failure is not None or time.monotonic() >= self._late_s)

    @property
    def has_begun(self) -> bool:
        """Whether its work is, or has been, done there."""
        return not self._work and not self._is_given_up

    def take_back(self) -> Callable[[], object] | None:
        """Its work, which it will never do; None where it has begun, or has nothing to do any more."""
        work = self._taken()
        if work is not None:
            self._is_given_up = True
            # Frees the thread that waits in `Thread.start`: with its stack it would be one less for good.
            if isinstance(started := getattr(self, "_started", None), threading.Event):
                started.set()
        return work

    def is_alive(self) -> bool:
        return not self._is_given_up and super().is_alive()

    def join(self, timeout: float | None = None) -> None:
        """As of any thread; at once where it was given up."""
        if not self._is_given_up:
            super().join(timeout)

    def run(self) -> None:
        self._settled.set()
        if (work := self._taken()) is not None:
            work()

    def _taken(self) -> Callable[[], object] | None:
        try:
            return self._work.pop()  # in one step of the interpreter's
        except IndexError:
            return None

    def _start(self) -> None:
        try:
            super().start()
        except Exception as error:  # whatever it is, the one who waits is told
            self._failure = error
            self._settled.set()

    def _why(self) -> str:
        if self._failure is None:
            return f"it was not up within {_UP_S:g} s"
        return str(self._failure) or type(self._failure).__name__


def tell_error() -> None:
    """Of the error that is being handled, as a thread tells that ends by one: for a thread that goes on."""
    kind, value, trace = sys.exc_info()
    if kind is not None:
        threading.excepthook(threading.ExceptHookArgs((kind, value, trace, threading.current_thread())))
