"""A process of a test's that does something and then waits."""

import os
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager


@contextmanager
def forked(run: Callable[[], object]) -> Generator[int]:
    """The pid of a process that has done it and waits for the end of the block."""
    has_run, running = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            run()
            os.write(running, b"x")
            signal.pause()
        finally:
            os._exit(2)
    os.close(running)
    try:
        assert os.read(has_run, 1) == b"x"
        yield pid
    finally:
        os.close(has_run)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
