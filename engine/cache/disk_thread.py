"""The one thread that reads and writes a disk tier, so that no step waits for a disk.

Requests with one prefix ask for the same entries: each is read once for all who wait for it, and not at all
where nobody does any more.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.cache.disk_tier import DiskStatistics, DiskTier
from engine.cache.entry import Kind
from protocol.handoff import KvPayload

Loaded = Callable[[KvPayload | None], None]
"""Gets an entry, or None, in the disk's thread."""


Wanted = Callable[[], bool]
"""Whether somebody still waits. Asked in the disk's thread; must not block."""


@dataclass(slots=True)
class _Load:
    kind: Kind
    key: bytes
    tag: bytes
    waiters: list[tuple[Loaded, Wanted]]


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
        self._loading: dict[tuple[Kind, bytes, bytes], _Load] = {}  # those, and the one that is being read
        self._stores: deque[_Store] = deque()
        self._waiting_bytes = self._dropped = 0
        self._busy = self._closed = False
        self._thread = threading.Thread(target=self._run, name="kv-disk", daemon=True)
        self._thread.start()

    def contains(self, kind: Kind, key: bytes) -> bool:
        """Whether there seems to be a file; does not wait for one that is being read."""
        return self._tier.seems_there(kind, key)

    def load(self, kind: Kind, key: bytes, tag: bytes, loaded: Loaded, wanted: Wanted = lambda: True) -> None:
        """`loaded` is called once in any case, with None where `wanted` says no by then."""
        with self._lock:
            load = self._loading.get((kind, key, tag))
            if load is None:
                load = self._loading[kind, key, tag] = _Load(kind, key, tag, [])
                self._loads.append(load)
            load.waiters.append((loaded, wanted))
            self._lock.notify_all()

    def store(self, kind: Kind, key: bytes, tag: bytes, payload: KvPayload, *, bounded: bool = True) -> None:
        """`bounded=False`: however much waits; for what is in memory anyway, before `close`."""
        with self._lock:
            full = bounded and self._waiting_bytes + payload.nbytes > self._max_waiting_bytes
            if self._closed or full:
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
        """Goes on whatever happens: without this thread each request would wait out its time for the disk."""
        while (job := self._next()) is not None:
            if isinstance(job, _Load):
                self._answer(job, self._read(job))
            else:
                self._write(job)
            self._done(job)

    def _read(self, load: _Load) -> KvPayload | None:
        with self._lock:
            if not any(wanted() for _, wanted in load.waiters):
                self._forget(load)
                return None
        try:
            with self._tier_lock:
                return self._tier.get(load.kind, load.key, load.tag)
        except Exception as error:  # a miss, and counted
            self._tier.count_failure(error)
            return None

    def _write(self, store: _Store) -> None:
        try:
            with self._tier_lock:
                self._tier.put(store.kind, store.key, store.tag, store.payload)
        except Exception as error:  # not stored, and counted
            self._tier.count_failure(error)

    def _answer(self, load: _Load, payload: KvPayload | None) -> None:
        """Whoever asks from here on has it read anew."""
        with self._lock:
            self._forget(load)
        for loaded, _ in load.waiters:
            try:
                loaded(payload)
            except Exception as error:  # the others are answered too
                self._tier.count_failure(error)

    def _forget(self, load: _Load) -> None:
        """Nobody joins it from here on. The lock is held."""
        if self._loading.get((load.kind, load.key, load.tag)) is load:
            del self._loading[load.kind, load.key, load.tag]

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
