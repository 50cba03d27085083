"""Things made ahead of need: links, writable layers. Making one takes longer than a create may."""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Generic, TypeVar

from protocol.errors import DockyardError
from protocol.threads import NoThread, TimelyThread

T = TypeVar("T")


class Pool(Generic[T]):
    """Keeps up to `size` things in stock. Each is claimed once, serves one sandbox and is removed by whoever
    claimed it. Thread-safe; `make` and `remove` are called on any thread."""

    def __init__(self, make: Callable[[], T], remove: Callable[[T], None], size: int) -> None:
        self._make, self._remove, self._size = make, remove, size
        self._lock = threading.Lock()  # guards what follows
        self._stock: deque[T] = deque()
        self._filler: threading.Thread | None = None
        self._closed = False

    def claim(self) -> T:
        """One from stock, else a new one. Raises what making one raises."""
        with self._lock:
            ready = [self._stock.popleft()] if self._stock else []
        self.fill()
        return ready[0] if ready else self._make()

    def fill(self) -> None:
        """Starts to make what is missing, in the background."""
        with self._lock:
            if self._closed or self._filler is not None or len(self._stock) >= self._size:
                return
            with suppress(NoThread, MemoryError):  # then nothing is made ahead
                filler = TimelyThread(self._fill, name="sandbox pool")
                filler.start()
                self._filler = filler

    def num_ready(self) -> int:
        """How many are in stock."""
        with self._lock:
            return len(self._stock)

    def wait(self) -> None:
        """Blocks until the stock is full, or cannot be filled."""
        self.fill()
        with self._lock:
            filler = self._filler
        if filler is not None:
            filler.join()

    def close(self) -> None:
        """Waits for the one that is being made and removes all in stock. Idempotent."""
        with self._lock:
            self._closed = True
            filler = self._filler
        if filler is not None:
            filler.join()
        while self._stock:
            self._remove(self._stock.popleft())

    def leave(self) -> Iterable[T]:
        """In a child of a fork, which makes its own: what was in stock is its parent's to hand out and to
        remove. Returns that."""
        left, self._stock = self._stock, deque()
        self._lock, self._filler = threading.Lock(), None
        return left

    def _fill(self) -> None:
        """Once, whatever ends it: the next claim begins another."""
        try:
            while self._is_wanted():
                one = self._make()
                with self._lock:
                    self._stock.append(one)
        except (DockyardError, OSError, MemoryError):
            return  # whoever claims the next makes it by himself, and hears why that fails
        finally:
            with self._lock:
                self._filler = None

    def _is_wanted(self) -> bool:
        with self._lock:
            return not self._closed and len(self._stock) < self._size
