"""The one thread that reads and writes a disk tier, so that no step waits for a disk."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.cache.disk_tier import DiskStatistics, DiskTier
from engine.cache.entry import Kind
from protocol.handoff import KvPayload

Loaded = Callable[[KvPayload | None], None]
"""Gets an entry, or None, in the disk's thread."""


@dataclass(frozen=True, slots=True)
class _Load:
    kind: Kind
    key: bytes
    tag: bytes
    loaded: Loaded


@dataclass(frozen=True, slots=True)
class _Store:
    kind: Kind
    key: bytes
    tag: bytes
    payload: KvPayload


class DiskThread:
    """Owns a disk tier. Loads go before writes; writes that wait are bounded by bytes, beyond which new ones
    are dropped and counted. Every method may be called from any thread; none waits for the disk but `flush`,
    `close` and `check_integrity`."""

    def __init__(self, tier: DiskTier, max_waiting_bytes: int) -> None:
        self._tier, self._max_waiting_bytes = tier, max_waiting_bytes
        self._lock = threading.Condition()
        self._tier_lock = threading.Lock()  # the auditor looks between two jobs
        self._loads: deque[_Load] = deque()
        self._stores: deque[_Store] = deque()
        self._waiting_bytes = self._dropped = 0
        self._busy = self._closed = False
        self._thread = threading.Thread(target=self._run, name="kv-disk", daemon=True)
        self._thread.start()

    def contains(self, kind: Kind, key: bytes) -> bool:
        """Whether there seems to be a file; does not wait for one that is being read."""
        return self._tier.seems_there(kind, key)

    def load(self, kind: Kind, key: bytes, tag: bytes, loaded: Loaded) -> None:
        with self._lock:
            self._loads.append(_Load(kind, key, tag, loaded))
            self._lock.notify_all()

    def store(self, kind: Kind, key: bytes, tag: bytes, payload: KvPayload) -> None:
        with self._lock:
            if self._closed or self._waiting_bytes + payload.nbytes > self._max_waiting_bytes:
                self._dropped += 1
                return
            self._waiting_bytes += payload.nbytes
            self._stores.append(_Store(kind, key, tag, payload))
            self._lock.notify_all()

    def flush(self) -> None:
        """Blocks until everything asked for so far is done."""
        with self._lock:
            self._lock.wait_for(lambda: not (self._loads or self._stores or self._busy))

    def close(self) -> None:
        """Ends the thread behind what was asked for. Blocks until then."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        self._thread.join()

    @property
    def dropped(self) -> int:
        """Writes for which too much was waiting already."""
        return self._dropped

    def statistics(self) -> DiskStatistics:
        return self._tier.statistics()

    def check_integrity(self) -> None:
        with self._tier_lock:
            self._tier.check_integrity()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            if isinstance(job, _Load):
                with self._tier_lock:
                    payload = self._tier.get(job.kind, job.key, job.tag)
                job.loaded(payload)
            else:
                with self._tier_lock:
                    self._tier.put(job.kind, job.key, job.tag, job.payload)
            self._done(job)

    def _next(self) -> _Load | _Store | None:
        with self._lock:
            self._lock.wait_for(lambda: self._loads or self._stores or self._closed)
            self._busy = bool(self._loads or self._stores)
            if self._loads:
                return self._loads.popleft()
            return self._stores.popleft() if self._stores else None

    def _done(self, job: _Load | _Store) -> None:
        with self._lock:
            self._busy = False
            if isinstance(job, _Store):
                self._waiting_bytes -= job.payload.nbytes
            self._lock.notify_all()
