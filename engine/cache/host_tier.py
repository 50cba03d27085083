"""KV in host memory, by key: bounded by bytes, least recently used first, pinned while somebody needs it."""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from protocol.clock import Clock
from protocol.handoff import KvPayload


@dataclass(frozen=True, slots=True)
class HostStatistics:
    """`bytes` of entries, `reserved_bytes` of swapped sequences; the rest counts since the start."""

    entries: int
    bytes: int
    reserved_bytes: int
    pinned: int
    hits: int
    misses: int
    stored: int
    refused: int  # no room: everything is pinned or reserved, or the entry is larger than the tier
    evictions: int
    expired: int


@dataclass(slots=True)
class _Entry:
    payload: KvPayload
    used_ns: int


@dataclass(slots=True)
class _Counts:
    hits: int = 0
    misses: int = 0
    stored: int = 0
    refused: int = 0
    evictions: int = 0
    expired: int = 0


class HostTier:
    """Thread-safe; nothing blocks but for a lock held for a moment. `ttl_ns`: since an entry's last use."""

    def __init__(
        self,
        num_bytes: int,
        clock: Clock,
        ttl_ns: int | None = None,
        on_evict: Callable[[bytes, KvPayload], None] | None = None,
    ) -> None:
        """`on_evict` is called with the lock held, with what goes for want of room."""
        self.num_bytes = num_bytes
        self._clock, self._ttl_ns, self._on_evict = clock, ttl_ns, on_evict
        self._lock = threading.RLock()
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first
        self._pins: Counter[bytes] = Counter()
        self._bytes = self._reserved = 0
        self._counts = _Counts()

    def __contains__(self, key: bytes) -> bool:
        with self._lock:
            self._expire()
            return key in self._entries

    def get(self, key: bytes) -> KvPayload | None:
        with self._lock:
            self._expire()
            entry = self._entries.get(key)
            if entry is None:
                self._counts.misses += 1
                return None
            self._counts.hits += 1
            entry.used_ns = self._clock.now_ns()
            self._entries.move_to_end(key)
            return entry.payload

    def put(self, key: bytes, payload: KvPayload) -> bool:
        """Keep it, if room can be made. What is known stays as it is: equal keys are equal bytes."""
        with self._lock:
            self._expire()
            if key in self._entries:
                self._entries.move_to_end(key)
                self._entries[key].used_ns = self._clock.now_ns()
                return True
            if not self._make_room(payload.nbytes):
                self._counts.refused += 1
                return False
            self._entries[key] = _Entry(payload, self._clock.now_ns())
            self._bytes += payload.nbytes
            self._counts.stored += 1
            return True

    def drop(self, key: bytes) -> None:
        """Forget one entry, unless it is pinned."""
        with self._lock:
            if key in self._entries and not self._pins[key]:
                self._remove(key)

    def clear(self) -> None:
        """Forget all entries, pinned ones too: their content fits nothing any more. Reservations stay."""
        with self._lock:
            self._entries.clear()
            self._pins.clear()
            self._bytes = 0

    def pin(self, key: bytes) -> bool:
        """Keep an entry until it is unpinned; False where there is none."""
        with self._lock:
            if key not in self._entries:
                return False
            self._pins[key] += 1
            return True

    def unpin(self, key: bytes) -> None:
        with self._lock:
            if self._pins[key] > 1:
                self._pins[key] -= 1
            else:
                self._pins.pop(key, None)

    def reserve(self, num_bytes: int) -> bool:
        """Take room for something that is no entry, if it can be made. `free` gives it back."""
        with self._lock:
            made = self._make_room(num_bytes)
            self._reserved += num_bytes if made else 0
            return made

    def free(self, num_bytes: int) -> None:
        with self._lock:
            self._reserved -= num_bytes
            assert self._reserved >= 0, "more host memory was freed than reserved"

    def statistics(self) -> HostStatistics:
        with self._lock:
            c = self._counts
            return HostStatistics(
                len(self._entries), self._bytes, self._reserved, sum(self._pins.values()), c.hits, c.misses,
                c.stored, c.refused, c.evictions, c.expired,
            )  # fmt: skip

    def entries(self) -> list[tuple[bytes, KvPayload]]:
        """All of them, least recently used first."""
        with self._lock:
            return [(key, entry.payload) for key, entry in self._entries.items()]

    def check_integrity(self) -> None:
        """Sizes add up and lie within the bound, and what is pinned is there; raises AssertionError."""
        with self._lock:
            assert self._bytes == sum(entry.payload.nbytes for entry in self._entries.values())
            assert self._bytes + self._reserved <= self.num_bytes, "the tier holds more than it may"
            assert self._pins.keys() <= self._entries.keys(), "what is pinned is gone"

    def _make_room(self, num_bytes: int) -> bool:
        pinned = sum(self._entries[key].payload.nbytes for key in self._pins if key in self._entries)
        if num_bytes + pinned + self._reserved > self.num_bytes:
            return False
        while self._bytes + self._reserved + num_bytes > self.num_bytes:
            key = next(key for key in self._entries if not self._pins[key])
            payload = self._remove(key)
            self._counts.evictions += 1
            if self._on_evict is not None:
                self._on_evict(key, payload)
        return True

    def _expire(self) -> None:
        """Entries are in order of use, so the first that is young enough ends the search."""
        if self._ttl_ns is None:
            return
        oldest_ns = self._clock.now_ns() - self._ttl_ns
        gone: list[bytes] = []
        for key, entry in self._entries.items():
            if entry.used_ns >= oldest_ns:
                break
            if not self._pins[key]:
                gone.append(key)
        for key in gone:
            self._remove(key)
            self._counts.expired += 1

    def _remove(self, key: bytes) -> KvPayload:
        payload = self._entries.pop(key).payload
        self._bytes -= payload.nbytes
        return payload
