"""What no interrupt may part.

Python calls signal handlers on the main thread, between any two of its steps, and what one raises (as Ctrl-C
does) goes up from there. A descriptor that was opened in the step before has no owner yet, one that was just
closed may be closed again and be a stranger's by then, and a lock that was just taken stays so. So whatever
owns something from one step to the next is done on a thread on which no handler runs, and the main thread
waits for it at a lock of the interpreter's own, which is taken in one step.
"""

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from functools import partial, wraps
from queue import SimpleQueue
from typing import Generic, ParamSpec, TypeVar

from protocol.threads import NoThread, TimelyThread
from sandbox.missing_threads import shortage

P = ParamSpec("P")
T = TypeVar("T")

PATIENCE_S = 5.0  # of who is interrupted, until what was begun has ended


class _Errand(Generic[T]):
    """One call, and how it ended. `run` and `undo` are for one thread, in this order or `undo` alone."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call: Callable[[], T] | None = call
        self._result: list[T] = []
        self._error: BaseException | None = None
        self.has_failed = False
        self.ended, self.undone = threading.Lock(), threading.Lock()
        self.ended.acquire()
        self.undone.acquire()

    def run(self) -> None:
        call, self._call = self._call, None
        try:
            if call is not None:
                self._result.append(call())
        except BaseException as error:  # handed to whoever waits
            self._error, self.has_failed = error, True
        finally:
            self.ended.release()

    def undo(self, undo: Callable[[T], object]) -> None:
        self._call = None
        try:
            with suppress(Exception):  # who would hear of it was interrupted; a sweep finds what is left
                for result in self._result:
                    undo(result)
        finally:
            self._result.clear()
            self.undone.release()

    def outcome(self) -> T:
        error, self._error = self._error, None
        if error is None:
            return self._result[0]
        try:
            raise error
        finally:
            del error  # or it would keep itself


class _Hand:
    """A thread that does one thing after another, and ends when nobody has this any more."""

    def __init__(self) -> None:
        """NoThread where the host has none left."""
        queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.give = queue.put
        weakref.finalize(self, queue.put, None).atexit = False
        shortage.start(TimelyThread(partial(_serve, queue), name="dockyard-hand"))


def _serve(queue: "SimpleQueue[Callable[[], None] | None]") -> None:
    while (work := queue.get()) is not None:
        work()
        del work  # what it holds is not this thread's to keep


_free: list[_Hand] = []  # for the main thread, whose handlers may need another while it waits
os.register_at_fork(after_in_child=_free.clear)


def undisturbed(
    call: Callable[[], T],
    undo: Callable[[T], object] | None = None,
    *,
    stop: Callable[[], object] | None = None,
    patience_s: float = PATIENCE_S,
) -> T:
    """The call's result, whatever is raised by signal handlers meanwhile: that waits until the call has ended
    and its result is undone, for `patience_s` at most, and goes on; what is left then is done all the same,
    later. A second interrupt goes on at once. `stop`, on a thread of its own, has a call that is interrupted
    end sooner. On any thread but the main one, it is the plain call."""
    if threading.get_ident() != threading.main_thread().ident:
        return call()
    try:
        hand = _free.pop() if _free else _Hand()
        other = None if stop is None else _free.pop() if _free else _Hand()
    except NoThread:  # better disturbed than not done
        return call()
    errand = _Errand(partial(copy_context().run, call))
    # One call, of C all through: a second interrupt comes before it or when all of it is under way.
    undoing = partial(errand.undo, undo or _keep)
    leave = partial(hand.give, undoing)
    if stop is not None and other is not None:
        leave = partial(other.give, partial(_stop, stop, hand, undoing))
    try:
        hand.give(errand.run)
        errand.ended.acquire()
        _free.append(hand)
        if other is not None:
            _free.append(other)
        return errand.outcome()
    except BaseException:
        if not errand.has_failed:
            leave()
            if errand.undone.acquire(timeout=patience_s) and hand not in _free:
                _free.append(hand)  # else it may be busy for long, and nothing is to wait behind it
        raise


def _stop(stop: Callable[[], object], hand: _Hand, undoing: Callable[[], None]) -> None:
    try:
        with suppress(Exception):  # then it ends when it ends
            stop()
    finally:
        hand.give(undoing)


def _keep(_: object) -> None:
    """What has changed stays so."""


def undisturbed_call(call: Callable[P, T]) -> Callable[P, T]:
    """A function that is `undisturbed` whenever it is called."""

    @wraps(call)
    def apart(*args: P.args, **options: P.kwargs) -> T:
        return undisturbed(partial(call, *args, **options))

    return apart
