"""How a process is told to end: by a signal, or because its parent has ended."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


class Stopped(BaseException):
    """A signal asked this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGTERM when the parent ends, whose pid it told us. Source: prctl(2)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before this call
        os.kill(os.getpid(), signal.SIGTERM)
