"""KV on disk: one file an entry, named by its key. A file that is not whole is a miss, never wrong KV.

A file is written under another name and renamed once it is complete, and its checksum is looked at when it
is read: whatever a crash leaves, at any byte, is either the whole entry or none. Several processes may share
a folder; each knows of the others' files when it starts, and finds newer ones by their names. Each bounds
what it knows of, so a folder holds at most the sum of their bounds. Files of other names are never touched.
"""

import contextlib
import errno
import itertools
import os
import re
import stat
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from engine.cache.entry import Kind, decode_entry, encode_entry
from engine.errors import UnusableTier
from protocol.handoff import KvPayload

_PART = ".part"  # of names of files that are being written
_ENTRY_NAME = re.compile(r"[0-9a-f]{32}\.(block|windows)")
_PART_NAME = re.compile(rf"{_ENTRY_NAME.pattern}\.\d+-\d+\{_PART}")
_ABANDONED_S = 3600.0  # a file still being written after an hour is nobody's
_FULL_FOR_S = 10.0  # after a full disk nothing is written for so long
_SLOW_LOOK_S = 0.1  # steps wait for a look at others' files; after one that took longer, or failed,
_BLIND_FOR_S = 10.0  # there is none for so long


@dataclass(frozen=True, slots=True)
class DiskStatistics:
    entries: int
    bytes: int
    hits: int
    misses: int
    stored: int
    evictions: int
    expired: int
    corrupt: int  # files that were not whole, or of something else; they are removed
    failures: int  # reads, writes and looks that the system refused
    skipped: int  # writes that were not tried: the disk was full a moment before
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
    skipped: int = 0
    last_error: str = ""


@dataclass(slots=True)
class _File:
    size: int
    used_s: float


@dataclass(slots=True)
class DiskTier:
    """Not thread-safe. Blocks for reads and writes; raises nothing once it is made: see `statistics`."""

    root: Path
    num_bytes: int
    ttl_s: float
    now_s: Callable[[], float] = time.time
    _files: OrderedDict[str, _File] = field(
        default_factory=OrderedDict[str, _File]
    )  # least recently used first
    _bytes: int = 0
    _full_until_s: float = 0.0
    _names: "itertools.count[int]" = field(default_factory=itertools.count)
    _counts: _Counts = field(default_factory=_Counts)
    _failed_looks: int = 0  # of its own, since another thread counts here
    _blind_until_s: float = 0.0

    def __post_init__(self) -> None:
        """Reads the folder. Raises UnusableTier where it cannot be made, read or written."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            probe = self.root / f"probe-{os.getpid()}{_PART}"
            probe.write_bytes(b"")
            probe.unlink()
            self._read_folder()
        except OSError as error:
            raise UnusableTier(
                f"tiers.disk_path {str(self.root)!r}: {error.strerror or error}",
                hint="name a folder that this user may write",
            ) from error

    def seems_there(self, kind: Kind, key: bytes) -> bool:
        """Whether there is a file. Changes no entry and waits for no other call: another thread may ask.

        Names that are not known are looked up on the disk, but for a while behind a slow or failed look.
        """
        name = _name(kind, key)
        found = self._files.get(name)
        if found is not None:
            return self.now_s() - found.used_s <= self.ttl_s
        begun_s = self.now_s()
        return begun_s >= self._blind_until_s and self._look(name, begun_s)

    def _look(self, name: str, begun_s: float) -> bool:
        found = failed = False
        try:
            self._path(name).stat()
            found = True
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError:
            failed = True
            self._failed_looks += 1
        now_s = self.now_s()
        if failed or now_s - begun_s > _SLOW_LOOK_S:
            self._blind_until_s = now_s + _BLIND_FOR_S
        return found

    def contains(self, kind: Kind, key: bytes) -> bool:
        """Whether there is a file, of another process perhaps; it may turn out not to be whole."""
        name = _name(kind, key)
        found = self._files.get(name)
        if found is not None:
            return self.now_s() - found.used_s <= self.ttl_s
        return self._adopt(name)

    def get(self, kind: Kind, key: bytes, tag: bytes) -> KvPayload | None:
        """`tag`: of the model whose entry it must be."""
        name = _name(kind, key)
        if not self.contains(kind, key):
            self._counts.misses += 1
            return None
        try:
            data = self._path(name).read_bytes()
        except FileNotFoundError:
            self._forget(name)
            self._counts.misses += 1
            return None
        except OSError as error:
            self._fail(error)
            return None
        payload = decode_entry(kind, key, tag, data)
        if payload is None:
            self._remove(name)
            self._counts.corrupt += 1
            return None
        self._counts.hits += 1
        self._touch(name, len(data))
        return payload

    def put(self, kind: Kind, key: bytes, tag: bytes, payload: KvPayload) -> bool:
        """Whether the entry is there now."""
        name = _name(kind, key)
        if self.contains(kind, key):
            return True
        if self.now_s() < self._full_until_s:
            self._counts.skipped += 1
            return False
        data = encode_entry(kind, key, tag, payload)
        if len(data) > self.num_bytes:
            return False
        self._expire()
        while self._bytes + len(data) > self.num_bytes:
            self._remove(next(iter(self._files)))
            self._counts.evictions += 1
        return self._write(name, data)

    def statistics(self) -> DiskStatistics:
        c = self._counts
        return DiskStatistics(
            len(self._files), self._bytes, c.hits, c.misses, c.stored, c.evictions, c.expired, c.corrupt,
            c.failures + self._failed_looks, c.skipped, c.last_error,
        )  # fmt: skip

    def check_integrity(self) -> None:
        """Sizes add up, and lie within the bound; raises AssertionError."""
        assert self._bytes == sum(file.size for file in self._files.values())
        assert self._bytes <= self.num_bytes, "the tier holds more than it may"

    def _write(self, name: str, data: bytes) -> bool:
        path = self._path(name)
        part = path.with_name(f"{name}.{os.getpid()}-{next(self._names)}{_PART}")
        try:
            path.parent.mkdir(exist_ok=True)
            part.write_bytes(data)
            part.replace(path)
        except OSError as error:
            self._fail(error)
            with contextlib.suppress(OSError):  # what refuses a write may refuse this
                part.unlink()
            return False
        self._counts.stored += 1
        self._add(name, len(data), self.now_s())
        return True

    def count_failure(self, error: Exception) -> None:
        """Of a read or write that ended in something that is no OSError."""
        self._counts.failures += 1
        self._counts.last_error = f"{self.root}: {type(error).__name__}: {error}"

    def _fail(self, error: OSError) -> None:
        self._counts.failures += 1
        self._counts.last_error = f"{self.root}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            self._full_until_s = self.now_s() + _FULL_FOR_S

    def _read_folder(self) -> None:
        found: list[tuple[float, str, int]] = []
        for path in self.root.glob("??/*"):
            is_part = _PART_NAME.fullmatch(path.name) is not None
            if not (is_part or _ENTRY_NAME.fullmatch(path.name)) or path.parent.name != path.name[:2]:
                continue
            try:
                status = path.lstat()
            except FileNotFoundError:  # another process has renamed or evicted it meanwhile
                continue
            if not stat.S_ISREG(status.st_mode):
                continue
            if not is_part:
                found.append((status.st_mtime, path.name, status.st_size))
            elif self.now_s() - status.st_mtime > _ABANDONED_S:
                path.unlink(missing_ok=True)
        for used_s, name, size in sorted(found):
            self._add(name, size, used_s)
        self._expire()
        while self._bytes > self.num_bytes:
            self._remove(next(iter(self._files)))

    def _adopt(self, name: str) -> bool:
        """A file that another process has written since we looked."""
        try:
            status = self._path(name).stat()
        except OSError:
            return False
        self._add(name, status.st_size, status.st_mtime)
        return self.now_s() - status.st_mtime <= self.ttl_s

    def _expire(self) -> None:
        while self._files:
            name, oldest = next(iter(self._files.items()))
            if self.now_s() - oldest.used_s <= self.ttl_s:
                return
            self._remove(name)
            self._counts.expired += 1

    def _touch(self, name: str, size: int) -> None:
        """Its time counts from its last use, for other processes too."""
        now_s = self.now_s()
        self._forget(name)
        self._add(name, size, now_s)
        try:
            os.utime(self._path(name), (now_s, now_s))
        except OSError as error:
            self._fail(error)

    def _add(self, name: str, size: int, used_s: float) -> None:
        self._forget(name)
        self._files[name] = _File(size, used_s)
        self._bytes += size

    def _forget(self, name: str) -> None:
        file = self._files.pop(name, None)
        self._bytes -= file.size if file is not None else 0

    def _remove(self, name: str) -> None:
        self._forget(name)
        try:
            self._path(name).unlink(missing_ok=True)
        except OSError as error:
            self._fail(error)

    def _path(self, name: str) -> Path:
        return self.root / name[:2] / name


def _name(kind: Kind, key: bytes) -> str:
    return f"{key.hex()}.{kind}"
