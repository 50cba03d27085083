"""Refusals in the audit log: what a sandbox has tried and its policy has not let through.

Whoever is refused decides how often, so the log is bounded by that: a kind of attempt is a line the first
time and the tenth, the hundredth and so on; a sandbox has at most 64 such lines; and all of a process have 20
a second, beyond a first 200. What is left out is counted, and said with the sandbox's end.
"""

import threading
import time
from collections.abc import Callable

from sandbox.audit_log import SandboxLog
from sandbox.forks import leave_in_children
from sandbox.refusals import Attempt

MAX_LINES = 64  # of a sandbox
MAX_TEXT = 255  # characters of what was tried: a name as long as names can be
_AT_ONCE, _A_SECOND = 200.0, 20.0  # lines of a process


class Allowance:
    """So many at once, and so many a second. Thread-safe."""

    def __init__(self, at_once: float, a_second: float, now_s: Callable[[], float] = time.monotonic) -> None:
        self._at_once, self._a_second, self._now_s = at_once, a_second, now_s
        self._lock = threading.Lock()  # guards what follows
        self._left, self._since_s = at_once, now_s()
        leave_in_children(self)

    def leave(self) -> None:
        """In a child of a fork, which is another process."""
        self._lock = threading.Lock()
        self._left, self._since_s = self._at_once, self._now_s()

    def take(self) -> bool:
        """Whether there is one left, which is then taken."""
        with self._lock:
            now_s = self._now_s()
            self._left = min(self._at_once, self._left + (now_s - self._since_s) * self._a_second)
            self._since_s = now_s
            if self._left < 1:
                return False
            self._left -= 1
            return True


_process = Allowance(_AT_ONCE, _A_SECOND)


class RefusalLog:
    """One sandbox's; a watcher of its `Refusals`. Thread-safe. A line is some ten microseconds for whoever
    reads the kernel's log."""

    def __init__(self, log: SandboxLog, allowance: Allowance = _process) -> None:
        self._log, self._allowance = log, allowance
        self._lock = threading.Lock()  # guards what follows
        self._num_lines = self._num_left_out = 0

    def __call__(self, attempt: Attempt, count: int) -> None:
        """Writes a line, or counts one that is left out. Never fails."""
        with self._lock:
            if not _is_round(count) or self._num_lines >= MAX_LINES or not self._allowance.take():
                self._num_left_out += 1
                return
            self._num_lines += 1
        about = {"hook": attempt.hook, "address": attempt.address[:MAX_TEXT], "port": attempt.port}
        self._log.note("refused", count=count, protocol=attempt.protocol, why=attempt.why[:MAX_TEXT], **about)

    @property
    def num_left_out(self) -> int:
        """Attempts that have no line of their own."""
        with self._lock:
            return self._num_left_out


def _is_round(count: int) -> bool:
    """A power of ten."""
    while count % 10 == 0:
        count //= 10
    return count == 1
