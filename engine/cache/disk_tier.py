"""KV on disk: one file an entry, named by its key. A file that is not whole is a miss, never wrong KV.

A file is written under another name and renamed once it is complete, and its checksum is looked at when it
is read: whatever a crash leaves, at any byte, is either the whole entry or none. Nothing is flushed to the
medium (no fsync): entries are copies of what can be computed, and what a power cut takes is a miss. Several
processes may share a folder: they know alike what it holds (`folder_index`), and keep it within its bound
together. Files of other names are never touched.
"""

import contextlib
import errno
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.cache.entry import Kind, decode_entry, encode_entry
from engine.cache.events import Watch
from engine.cache.folder_index import PART, FolderBusy, FolderIndex
from engine.errors import UnusableTier
from protocol.handoff import KvPayload

_FULL_FOR_S = 10.0  # after a full disk nothing is written for so long
_BUSY_FOR_S = 1.0  # nor after a lock that was not to be had


@dataclass(frozen=True, slots=True)
class DiskStatistics:
    """`entries` and `bytes` of the folder, whoever has written them; the rest counts since the start."""

    entries: int
    bytes: int
    hits: int
    misses: int
    stored: int
    evictions: int
    expired: int
    corrupt: int  # files that were not whole, or of something else; they are removed
    failures: int  # reads and writes that the system refused, or had no memory for
    faults: int  # those that ended in an error of our own, which no disk makes
    skipped: int  # writes that were not tried: the disk was full, or locked, a moment before
    last_error: str


@dataclass(slots=True)
class _Counts:
    hits: int = 0
    misses: int = 0
    stored: int = 0
    evictions: int = 0
    expired: int = 0
    corrupt: int = 0
    failures: int = 0
    faults: int = 0
    skipped: int = 0
    last_error: str = ""


class DiskTier:
    """Not thread-safe, but for `seems_there`. Blocks for reads and writes, and raises nothing once it is
    made: see `statistics`."""

    def __init__(
        self,
        root: Path,
        num_bytes: int,
        ttl_s: float,
        now_s: Callable[[], float] = time.time,
        *,
        reads_at_once: bool = True,
        watch: Watch | None = None,
    ) -> None:
        """`num_bytes`: of the whole folder. `now_s`: of the wall clock, as files' times are, which outlive
        this process and which others set. `reads_at_once`: else `read_folder` comes before all but
        `seems_there`. Raises UnusableTier where the folder cannot be made, read, written or locked."""
        self.root, self.num_bytes, self.ttl_s, self.now_s = root, num_bytes, ttl_s, now_s
        self._counts = _Counts()
        self._names = itertools.count()
        self._idle_until_s = -1.0  # nothing is written before
        try:
            self._index = FolderIndex(root, watch)
        except OSError as error:
            raise UnusableTier(
                f"tiers.disk_path {str(root)!r}: {error.strerror or error}",
                hint="name a folder of a local disk that this user may write",
            ) from error
        if reads_at_once:
            self.read_folder()

    def read_folder(self) -> None:
        """Learn what is there; what is too old, or too much, goes."""
        try:
            self._index.read_folder(self.now_s())
            self._expire()
            self._make_room(0)
        except OSError as error:
            self._fail(error)

    def read_news(self) -> None:
        """Learn what other processes have written and removed."""
        try:
            self._index.catch_up()
        except OSError as error:
            self._fail(error)

    def seems_there(self, kind: Kind, key: bytes) -> bool:
        """Whether an entry is known. Asks no disk and waits for nothing: any thread may call it."""
        return self._is_fresh(_name(kind, key))

    def get(self, kind: Kind, key: bytes, tag: bytes) -> KvPayload | None:
        """`tag`: of the model whose entry it must be."""
        name = _name(kind, key)
        if not self._is_fresh(name):
            self._counts.misses += 1
            return None
        try:
            data = self._index.path(name).read_bytes()
        except FileNotFoundError:  # another process has evicted it
            self._index.forget(name)
            self._counts.misses += 1
            return None
        except OSError as error:
            self._fail(error)
            return None
        payload = decode_entry(kind, key, tag, data)
        if payload is None:
            self._counts.corrupt += 1
            self._give_up(name)
            return None
        self._counts.hits += 1
        try:
            self._index.use(name, self.now_s())
        except FileNotFoundError:  # it has been evicted just now
            self._index.forget(name)
        except OSError as error:
            self._fail(error)
        return payload

    def put(self, kind: Kind, key: bytes, tag: bytes, payload: KvPayload) -> bool:
        """Whether the entry is there now."""
        name = _name(kind, key)
        if self._is_fresh(name):
            return True
        if self.now_s() < self._idle_until_s:
            self._counts.skipped += 1
            return False
        data = encode_entry(kind, key, tag, payload)
        if len(data) > self.num_bytes:
            return False
        try:
            with self._index.locked(self.now_s()):
                return self._is_fresh(name) or self._write(name, data)
        except FolderBusy:
            self._counts.skipped += 1
            self._idle_until_s = self.now_s() + _BUSY_FOR_S
        except OSError as error:
            self._fail(error)
        return False

    def statistics(self) -> DiskStatistics:
        c = self._counts
        return DiskStatistics(
            entries=len(self._index.files), bytes=self._index.num_bytes, hits=c.hits, misses=c.misses,
            stored=c.stored, evictions=c.evictions, expired=c.expired, corrupt=c.corrupt,
            failures=c.failures, faults=c.faults, skipped=c.skipped, last_error=c.last_error,
        )  # fmt: skip

    def check_integrity(self) -> None:
        """Sizes add up, and nothing has ended in an error of our own; raises AssertionError."""
        assert not self._counts.faults, f"{self._counts.faults} faults, the last: {self._counts.last_error}"
        assert self._index.num_bytes == sum(file.size for file in self._index.files.values())

    def count_failure(self, error: Exception) -> None:
        """Of a read or write that ended in something that is no OSError: for want of memory, or a fault."""
        if isinstance(error, MemoryError):
            self._counts.failures += 1
        else:
            self._counts.faults += 1
        self._counts.last_error = f"{self.root}: {type(error).__name__}: {error}"

    def _is_fresh(self, name: str) -> bool:
        found = self._index.files.get(name)
        return found is not None and self.now_s() - found.used_s <= self.ttl_s

    def _write(self, name: str, data: bytes) -> bool:
        """The folder's lock is held, so that nobody else fills the room that is made here."""
        self._expire()
        self._make_room(len(data))
        path, now_s = self._index.path(name), self.now_s()
        part = path.with_name(f"{name}.{os.getpid()}-{next(self._names)}{PART}")
        try:
            path.parent.mkdir(exist_ok=True)
            part.write_bytes(data)
            os.utime(part, (now_s, now_s))
            part.replace(path)
            self._index.add(name, len(data), now_s)
        except BaseException:  # no memory, say: what is left would be outside the folder's bound
            for left in (part, path):
                with contextlib.suppress(OSError):  # what refuses a write may refuse this
                    left.unlink()
            self._index.forget(name)
            raise
        self._counts.stored += 1
        return True

    def _make_room(self, num_bytes: int) -> None:
        while self._index.files and self._index.num_bytes + num_bytes > self.num_bytes:
            self._remove(self._index.oldest())
            self._counts.evictions += 1

    def _expire(self) -> None:
        """The first that is young enough ends the search."""
        while self._index.files and not self._is_fresh(name := next(iter(self._index.files))):
            if self._index.oldest() == name:
                self._remove(name)
                self._counts.expired += 1

    def _give_up(self, name: str) -> None:
        """One that is not whole."""
        try:
            with self._index.locked(self.now_s()):
                self._remove(name)
        except FolderBusy:
            self._index.forget(name)
        except OSError as error:
            self._fail(error)

    def _remove(self, name: str) -> None:
        try:
            self._index.path(name).unlink(missing_ok=True)
            self._index.drop(name)
        except OSError as error:
            self._index.forget(name)
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self._counts.failures += 1
        self._counts.last_error = f"{self.root}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            self._idle_until_s = self.now_s() + _FULL_FOR_S


def _name(kind: Kind, key: bytes) -> str:
    return f"{key.hex()}.{kind}"
