"""KV in host memory, by key: bounded by bytes, least recently used first, pinned while somebody needs it.

Pinned entries lie apart from those that may go, so that no call looks through them. An entry that is unpinned
for the last time counts as used just then.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from engine.cache.events import Unwatched, Watch
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
    refused: int  # no room: all is pinned or reserved, the entry is too large, or memory is out
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
        watch: Watch | None = None,
    ) -> None:
        """`on_evict` is called with the lock held, with what goes for want of room. `watch` hears of all but
        `clear`, whose caller tells of it."""
        self.num_bytes = num_bytes
        self._clock, self._ttl_ns, self._on_evict = clock, ttl_ns, on_evict
        self._watch: Watch = watch or Unwatched()
        self._lock = threading.RLock()
        self._free: OrderedDict[bytes, _Entry] = OrderedDict()  # not pinned; least recently used first
        self._pinned: dict[bytes, _Entry] = {}
        self._pins: Counter[bytes] = Counter()
        self._num_pins = 0
        self._bytes = self._pinned_bytes = self._reserved = 0
        self._counts = _Counts()

    def __contains__(self, key: bytes) -> bool:
        with self._lock:
            self._expire()
            return key in self._free or key in self._pinned

    def get(self, key: bytes, *, again: bool = False) -> KvPayload | None:
        """`again`: the same request has asked before; hits and misses are counted once."""
        with self._lock:
            self._expire()
            entry = self._use(key)
            if not again:
                self._counts.hits += entry is not None
                self._counts.misses += entry is None
            return None if entry is None else entry.payload

    def put(self, key: bytes, payload: KvPayload) -> bool:
        """Keep it, if room can be made. What is known stays as it is: equal keys are equal bytes."""
        with self._lock:
            self._expire()
            if self._use(key) is not None:
                return True
            if not self._make_room(payload.nbytes):
                self._counts.refused += 1
                return False
            self._free[key] = _Entry(payload, self._clock.now_ns())
            self._bytes += payload.nbytes
            self._counts.stored += 1
            self._watch.came([key])
            return True

    def refuse(self) -> None:
        """Count an entry for whose copy there was no memory."""
        with self._lock:
            self._counts.refused += 1

    def drop(self, key: bytes) -> None:
        """Forget one entry, unless it is pinned."""
        with self._lock:
            if key in self._free:
                self._remove(key)

    def clear(self) -> None:
        """Forget all entries, pinned ones too: their content fits nothing any more. Reservations stay."""
        with self._lock:
            self._free.clear()
            self._pinned.clear()
            self._pins.clear()
            self._bytes = self._pinned_bytes = self._num_pins = 0

    def pin(self, key: bytes) -> bool:
        """Keep an entry until it is unpinned; False where there is none."""
        with self._lock:
            entry = self._free.pop(key, None)
            if entry is not None:
                self._pinned[key] = entry
                self._pinned_bytes += entry.payload.nbytes
            elif key not in self._pinned:
                return False
            self._pins[key] += 1
            self._num_pins += 1
            return True

    def unpin(self, key: bytes) -> None:
        with self._lock:
            if key not in self._pinned:  # everything was forgotten meanwhile
                return
            self._pins[key] -= 1
            self._num_pins -= 1
            if self._pins[key] == 0:
                del self._pins[key]
                entry = self._free[key] = self._pinned.pop(key)
                entry.used_ns = self._clock.now_ns()
                self._pinned_bytes -= entry.payload.nbytes

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
                len(self._free) + len(self._pinned), self._bytes, self._reserved, self._num_pins, c.hits,
                c.misses, c.stored, c.refused, c.evictions, c.expired,
            )  # fmt: skip

    def entries(self) -> list[tuple[bytes, KvPayload]]:
        """All of them, least recently used first; pinned ones are in use."""
        with self._lock:
            both = (*self._free.items(), *self._pinned.items())
            return [(key, entry.payload) for key, entry in both]

    def check_integrity(self) -> None:
        """Sizes add up and lie within the bound, and what is pinned is there; raises AssertionError."""
        with self._lock:
            pinned_bytes = sum(entry.payload.nbytes for entry in self._pinned.values())
            free_bytes = sum(entry.payload.nbytes for entry in self._free.values())
            assert (self._bytes, self._pinned_bytes) == (free_bytes + pinned_bytes, pinned_bytes)
            assert self._bytes + self._reserved <= self.num_bytes, "the tier holds more than it may"
            assert self._pins.keys() == self._pinned.keys(), "what is pinned is gone, or kept for nobody"
            assert self._num_pins == sum(self._pins.values())
            assert not self._free.keys() & self._pinned.keys(), "an entry is in two places"

    def _make_room(self, num_bytes: int) -> bool:
        if num_bytes + self._pinned_bytes + self._reserved > self.num_bytes:
            return False
        while self._bytes + self._reserved + num_bytes > self.num_bytes:
            key = next(iter(self._free))
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
        while self._free:
            key, entry = next(iter(self._free.items()))
            if entry.used_ns >= oldest_ns:
                return
            self._remove(key)
            self._counts.expired += 1

    def _use(self, key: bytes) -> _Entry | None:
        entry = self._free.get(key) or self._pinned.get(key)
        if entry is not None:
            entry.used_ns = self._clock.now_ns()
            if key in self._free:
                self._free.move_to_end(key)
        return entry

    def _remove(self, key: bytes) -> KvPayload:
        """Of what is not pinned."""
        payload = self._free.pop(key).payload
        self._bytes -= payload.nbytes
        self._watch.went([key])
        return payload
