"""What of a sandbox's memory is left for what its owner writes.

Init writes it, and the kernel charges who writes. Where memory is full and no command is there to be ended,
the OOM killer would take init, and the sandbox with it: so what there is no room for is refused before it is
sent.
"""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from sandbox.kernel_files import read_small

SPARE_BYTES = 2 << 20  # left to init, which starts commands, and for what the kernel has not counted yet
_AMPLE_BYTES = 64 << 20  # with so much left, writes need not wait for each other: each is a chunk at most
# Of memory.stat: what the kernel drops when others need it. Files in memory are not among it.
_DROPPED = {1: ("total_inactive_file", "total_active_file"), 2: ("inactive_file", "active_file")}
_USED = {1: "memory.usage_in_bytes", 2: "memory.current"}


class Room:
    """Of one sandbox. Thread-safe. Without a group or a limit there is always room."""

    def __init__(self, group: Path | None, version: Literal[1, 2], limit_bytes: int | None) -> None:
        self._group, self._version, self._limit_bytes = group, version, limit_bytes
        self._turn = threading.Lock()  # where it is scarce, one write at a time

    @contextmanager
    def taken(self, num_bytes: int) -> Generator[bool]:
        """Whether there is room for so many bytes, which the block then writes. Where it is scarce, others
        wait for the end of the block."""
        if self._left(num_bytes + _AMPLE_BYTES) >= 0:
            yield True
            return
        with self._turn:
            yield self._left(num_bytes + SPARE_BYTES) + self._dropped() >= 0

    def _left(self, beyond: int) -> int:
        if self._group is None or self._limit_bytes is None:
            return 0
        try:
            return self._limit_bytes - beyond - int(read_small(self._group / _USED[self._version]))
        except OSError:  # it has ended, or no descriptor is free: what is asked of it says so
            return 0

    def _dropped(self) -> int:
        if self._group is None:
            return 0
        try:
            lines = map(str.split, read_small(self._group / "memory.stat").splitlines())
        except OSError:
            return 0
        return sum(int(words[1]) for words in lines if words[0] in _DROPPED[self._version])
