"""How a process is told to end: by a signal, or because its parent has ended.

Half a cluster cannot be shut down, Ray's libraries put handlers of their own on SIGTERM while they start, and
an exception that a handler raises within them is lost. So a server holds the signals back from its first line
to its last. It asks for them while the workers load, and hears them while the gateway runs.
"""

import ctypes
import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

PROGRESS = "· "  # how a line of progress begins, by which a parent finds it in a log
_PR_SET_PDEATHSIG = 1
_ENDING = (signal.SIGTERM, signal.SIGINT)


class Stopped(BaseException):
    """A signal asked this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def signals_held() -> Generator[None]:
    """Hold SIGTERM and SIGINT back from the main thread and from every thread that the block starts.

    Enter it before a library starts threads. Children that Python forks with a `preexec_fn`, as Ray's daemons
    are, hear the signals as ever. What comes after they were last asked for is dropped: the process ends
    anyway.
    """
    before = [signal.getsignal(number) for number in _ENDING]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    os.register_at_fork(after_in_child=_hear)
    try:
        yield
    finally:
        while signal.sigtimedwait(_ENDING, 0) is not None:
            pass
        for number, handler in zip(_ENDING, before, strict=True):
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def raise_if_told() -> None:
    """Within `signals_held`: raise `Stopped` where a signal has come. Does not block."""
    told = signal.sigtimedwait(_ENDING, 0)
    if told is not None:
        raise Stopped(told.si_signo)


@contextmanager
def signals_heard() -> Generator[None]:
    """Within `signals_held`: a signal that came or comes is raised as `Stopped`, once."""
    for number in _ENDING:
        signal.signal(number, _stop)  # not before: Ray's libraries replace it beneath Python
    try:
        _hear()
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)


def _stop(number: int, frame: FrameType | None) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    raise Stopped(number)


def _hear() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)


def die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGTERM when the parent ends, whose pid it told us. Source: prctl(2)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before this call
        os.kill(os.getpid(), signal.SIGTERM)
