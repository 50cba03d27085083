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
from protocol.clock import Clock, SystemClock
from protocol.errors import ResourceShortage
from protocol.handoff import KvPayload
from protocol.threads import NoThread, TimelyThread

_NEWS_EVERY_NS = 500_000_000  # what other processes have written is looked for at most so often

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


@dataclass(frozen=True, slots=True)
class _News:
    """What other processes have done is to be read."""


@dataclass(frozen=True, slots=True)
class DiskQueue:
    """Reads and writes that wait for the disk; the bytes are those of writes, the running one among them."""

    loads: int = 0
    stores: int = 0
    store_bytes: int = 0


class DiskThread:
    """Owns a disk tier. Loads go before writes; writes that wait are bounded by bytes, beyond which new ones
    are dropped and counted. A job that fails is a miss, or not stored, and counted: as the disk's failure, or
    as a fault of ours, which `check_integrity` tells. Every method may be called from any thread; none waits
    for the disk but `flush`, `close` and `check_integrity`."""

    def __init__(self, tier: DiskTier, max_waiting_bytes: int, clock: Clock | None = None) -> None:
        """`tier`: made with `reads_at_once=False`, or not; the thread begins by reading the folder. Raises
        ResourceShortage where no thread is to be had."""
        self._tier, self._max_waiting_bytes = tier, max_waiting_bytes
        self._clock = clock or SystemClock()
        self._lock = threading.Condition()
        self._tier_lock = threading.Lock()  # the auditor looks between two jobs
        self._loads: deque[_Load] = deque()
        self._loading: dict[tuple[Kind, bytes, bytes], _Load] = {}  # those, and the one that is being read
        self._stores: deque[_Store] = deque()
        self._waiting_bytes = self._dropped = 0
        self._busy = True  # reads the folder
        self._is_read = self._closed = False
        self._when_read: list[Callable[[], None]] = []
        self._news_wanted = False
        self._next_news_ns = 0
        self._thread = TimelyThread(self._run, name="kv-disk")
        try:
            self._thread.start()
        except NoThread as error:
            raise ResourceShortage(f"tiers.disk_path: there is no thread that reads it: {error}") from error

    def contains(self, kind: Kind, key: bytes) -> bool:
        """Whether an entry is known. Asks no disk; what other processes have written is known a moment after
        somebody has missed it."""
        if self._tier.seems_there(kind, key):
            return True
        if not self._news_wanted and self._clock.now_ns() >= self._next_news_ns:
            with self._lock:
                self._news_wanted = True
                self._lock.notify_all()
        return False

    @property
    def is_read(self) -> bool:
        """Whether it is known what the folder holds."""
        return self._is_read

    def when_read(self, call: Callable[[], None]) -> None:
        """Calls it once: now, or in the disk's thread when the folder has been read."""
        with self._lock:
            if not self._is_read:
                self._when_read.append(call)
                return
        call()

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
            self._lock.wait_for(lambda: not (self._loads or self._stores or self._busy or self._news_wanted))

    def close(self) -> None:
        """Ends the thread behind what was asked for. Blocks until then."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        self._thread.join()

    def queue(self) -> DiskQueue:
        """What waits."""
        with self._lock:
            return DiskQueue(len(self._loads), len(self._stores), self._waiting_bytes)

    @property
    def dropped(self) -> int:
        """Writes for which too much was waiting already."""
        return self._dropped

    def statistics(self) -> DiskStatistics:
        return self._tier.statistics()

    def check_integrity(self) -> None:
        if not self._is_read:
            return
        with self._tier_lock:
            self._tier.check_integrity()

    def _run(self) -> None:
        """Goes on whatever happens: without this thread each request would wait out its time for the disk."""
        self._read_folder()
        while (job := self._next()) is not None:
            if isinstance(job, _News):
                self._read_news()
            elif isinstance(job, _Load):
                self._answer(job, self._read(job))
            else:
                self._write(job)
            self._done(job)

    def _read_folder(self) -> None:
        try:
            with self._tier_lock:
                self._tier.read_folder()
        except Exception as error:  # nothing is known then, and it is counted
            self._tier.count_failure(error)
        with self._lock:
            self._is_read, self._busy = True, False
            calls, self._when_read = self._when_read, []
            self._lock.notify_all()
        for call in calls:
            call()

    def _read_news(self) -> None:
        try:
            with self._tier_lock:
                self._tier.read_news()
        except Exception as error:
            self._tier.count_failure(error)
        self._next_news_ns = self._clock.now_ns() + _NEWS_EVERY_NS

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

    def _next(self) -> _Load | _Store | _News | None:
        with self._lock:
            self._lock.wait_for(lambda: self._loads or self._stores or self._news_wanted or self._closed)
            self._busy = bool(self._loads or self._stores or self._news_wanted)
            if self._loads:
                return self._loads.popleft()
            if self._news_wanted:
                self._news_wanted = False
                return _News()
            return self._stores.popleft() if self._stores else None

    def _done(self, job: _Load | _Store | _News) -> None:
        with self._lock:
            self._busy = False
            if isinstance(job, _Store):
                self._waiting_bytes -= job.payload.nbytes
            self._lock.notify_all()
