"""How many sandboxes are made at a time.

Making one keeps a core busy from end to end. Many at once share the cores out, and all are ready when the
last one is; in turn, half of them are ready in half of that time and none of them later, and fewer threads
hand the interpreter to each other meanwhile.
"""

import os
import threading
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache

PATIENCE_S = 5.0  # then one goes ahead: those before it may wait for something else than a core


class Turns:
    """First come, first served. Thread-safe."""

    def __init__(self, count: int, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._lock = threading.Lock()  # guards what follows
        self._num_free = count
        self._waiting: deque[threading.Lock] = deque()

    @contextmanager
    def one(self) -> Generator[None]:
        """Blocks until it is the caller's turn, which lasts as long as the block."""
        is_counted = self._take()
        try:
            yield
        finally:
            if is_counted:
                self._give()

    def _take(self) -> bool:
        """False when patience has ended."""
        with self._lock:
            if self._num_free:
                self._num_free -= 1
                return True
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        try:
            has_come = turn.acquire(timeout=self._patience_s)
        except BaseException:
            if not self._withdraw(turn):
                self._give()
            raise
        return has_come or not self._withdraw(turn)

    def _withdraw(self, turn: threading.Lock) -> bool:
        """False when the turn has come meanwhile."""
        with self._lock:
            if turn not in self._waiting:
                return False
            self._waiting.remove(turn)
            return True

    def _give(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._num_free += 1


@cache
def turns_to_make() -> Turns:
    """Those of all sandboxes of this process: a core more than there are, since each waits now and then."""
    return Turns(len(os.sched_getaffinity(0)) + 1)


# Threads that have one are not in a forked process.
os.register_at_fork(after_in_child=turns_to_make.cache_clear)
