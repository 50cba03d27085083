"""What a request waits for before it is scheduled: entries on their way from disk to host memory."""

import threading
from collections.abc import Callable

from engine.cache.host_tier import HostTier
from protocol.handoff import KvPayload


class Prefetch:
    """Entries on their way from disk to host memory, where they stay pinned until `release`."""

    def __init__(self, deadline_ns: int, on_done: Callable[["Prefetch"], None] = lambda _: None) -> None:
        """`on_done` is called once, in the disk's thread, when all that will come is there behind `seal`."""
        self.deadline_ns = deadline_ns
        self._on_done = on_done
        self._lock = threading.Lock()
        self._waiting = 0
        self._pins: list[tuple[HostTier, bytes]] = []
        self._released = self._sealed = False
        self._arrived = threading.Event()

    def wait(self, timeout_s: float) -> None:
        """Blocks until the last entry has come, or for so long."""
        self._arrived.wait(timeout_s)

    @property
    def done(self) -> bool:
        """Whether all that will come is there, and pinned."""
        return self._waiting == 0

    @property
    def wanted(self) -> bool:
        """Whether somebody still waits for what is to come."""
        return not self._released

    @property
    def num_pins(self) -> int:
        return len(self._pins)

    def expect(self) -> None:
        with self._lock:
            self._waiting += 1
            self._arrived.clear()

    def seal(self) -> bool:
        """No more is expected. Whether something is on its way: else nobody is told."""
        with self._lock:
            self._sealed = True
            return self._waiting > 0

    def arrived(self, tier: HostTier, key: bytes, payload: KvPayload | None) -> None:
        """In the disk's thread: keep what has come, unless nobody waits for it any more."""
        with self._lock:
            try:
                if payload is not None and self.wanted and tier.put(key, payload) and tier.pin(key):
                    self._pins.append((tier, key))
            finally:  # last: `done` is asked without the lock
                self._count_arrived()

    def count_arrived(self) -> None:
        """What was expected is there, and no entry."""
        with self._lock:
            self._count_arrived()

    def hold(self, tier: HostTier, key: bytes) -> None:
        """Pin what is in host memory already."""
        with self._lock:
            if tier.pin(key):
                self._pins.append((tier, key))

    def release(self) -> None:
        with self._lock:
            self._released = True
            for tier, key in reversed(self._pins):  # ends of a prefix are of no use without its start
                tier.unpin(key)
            self._pins.clear()

    def _count_arrived(self) -> None:
        self._waiting -= 1
        if self._waiting == 0:
            self._arrived.set()
            if self._sealed:
                self._on_done(self)
