"""Links made ahead of need: making one takes many times as long as all the rest of a sandbox's network."""

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from protocol.errors import DockyardError
from sandbox.egress.links import Link


class LinkPool:
    """Keeps up to `size` links in stock. Each is claimed once, serves one sandbox and is removed by whoever
    claimed it. Thread-safe."""

    def __init__(self, make: Callable[[], Link], remove: Callable[[Link], None], size: int) -> None:
        self._make, self._remove, self._size = make, remove, size
        self._lock = threading.Lock()  # guards what follows
        self._stock: deque[Link] = deque()
        self._filler: threading.Thread | None = None
        self._closed = False

    def claim(self) -> Link:
        """One from stock, else a new one. Raises what making one raises."""
        with self._lock:
            link = self._stock.popleft() if self._stock else None
        self.fill()
        return link or self._make()

    def fill(self) -> None:
        """Starts to make what is missing, in the background."""
        with self._lock:
            if self._closed or self._filler is not None or len(self._stock) >= self._size:
                return
            filler = threading.Thread(target=self._fill, name="link pool", daemon=True)
            with suppress(RuntimeError):  # no thread is free: then nothing is made ahead
                filler.start()
                self._filler = filler

    def num_ready(self) -> int:
        """Links in stock."""
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

    def _fill(self) -> None:
        while self._is_wanted():
            try:
                link = self._make()
            except (DockyardError, OSError):
                break  # whoever claims the next makes it by himself, and hears why that fails
            with self._lock:
                self._stock.append(link)
        with self._lock:
            self._filler = None

    def _is_wanted(self) -> bool:
        with self._lock:
            return not self._closed and len(self._stock) < self._size
