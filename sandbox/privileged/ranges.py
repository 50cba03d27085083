"""Ranges of ids for sandboxes: one book for all helpers of the machine, in which a range is one user's."""

import fcntl
import os
import secrets
from array import array
from collections import deque
from collections.abc import Iterable
from pathlib import Path

NUM_IDS = 65536  # of a sandbox
# Above what useradd has for subordinate ids (to 600,100,000), nspawn (to 0x6fffffff) and SSSD for users of a
# directory (to 2,000,200,000).
FIRST_ID, LAST_ID = 0x80000000, 0xFFF00000
MOST_OF_A_USER = 2048
_NUM_RANGES = (LAST_ID - FIRST_ID) // NUM_IDS


class Ranges:
    """One user's. A range that he has had is no other's until the machine restarts: whatever he leaves behind
    in it, a process or a namespace, meets nobody else's. `own`: those of before, in use yet. OSError."""

    def __init__(self, uid: int, book: Path) -> None:
        self._uid = uid
        self._book = os.open(book, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.own = [FIRST_ID + at * NUM_IDS for at, each in enumerate(self._owners()) if each == uid]
        self._idle, self._num_own = deque[int](), len(self.own)

    def draw(self) -> int | None:
        """The first id of one that is in no use: the one of his that has rested longest, else one that nobody
        has had. None where there is none."""
        if self._idle:
            return self._idle.popleft()
        fcntl.flock(self._book, fcntl.LOCK_EX)
        try:
            owners, start = self._owners(), secrets.randbelow(_NUM_RANGES)
            places = (at % _NUM_RANGES for at in range(start, start + _NUM_RANGES))
            at = next((at for at in places if not owners[at]), None)
            if at is None or self._num_own >= MOST_OF_A_USER:
                return None
            os.pwrite(self._book, array("I", [self._uid]).tobytes(), 4 * at)
        finally:
            fcntl.flock(self._book, fcntl.LOCK_UN)
        self._num_own += 1
        return FIRST_ID + at * NUM_IDS

    def give_back(self, firsts: Iterable[int]) -> None:
        """Of sandboxes that have ended."""
        self._idle.extend(firsts)

    def _owners(self) -> "array[int]":
        found = array("I")
        found.frombytes(os.pread(self._book, 4 * _NUM_RANGES, 0).ljust(4 * _NUM_RANGES, b"\0"))
        return found
