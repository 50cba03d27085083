"""Time is injected: code that measures or waits takes a `Clock`."""

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock shared by all processes of one host (Linux CLOCK_MONOTONIC)."""

    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary origin, the same one in every process of this host."""
        ...


class SystemClock:
    """CLOCK_MONOTONIC. Comparable between processes of one host, not between hosts."""

    def now_ns(self) -> int:
        return time.monotonic_ns()
