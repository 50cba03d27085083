"""Ends a child process when its parent does, so that a killed command leaves no server behind."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGTERM when the parent ends, whose pid it told us. Source: prctl(2)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before this call
        os.kill(os.getpid(), signal.SIGTERM)
