"""What a folder of entries holds, known alike to all processes that share it.

Beside the entries lies a log of what came and went, which every process reads on; who wants to write an entry
holds the folder's lock, so that all of them together keep one bound. The log is made anew from the folder
whenever a process begins, so it may be wrong and never has to be mended: one killed at any place leaves an
entry that nobody counts until then, or a count of an entry that is gone until somebody tries to remove it.

A record has 64 bytes: sign (1), kind (1), nothing (2), CRC-32 of the rest (4), key (16), size (8), time of
its last use in seconds (8), nothing (24). `+` has come, `-` has gone; the first record, `#`, has a random
key, which tells one log from the next.
"""

import contextlib
import errno
import fcntl
import os
import re
import stat
import struct
import time
import zlib
from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from engine.cache.events import Unwatched, Watch

ENTRY_NAME = re.compile(r"[0-9a-f]{32}\.(block|windows)")
PART = ".part"  # of names of files that are being written

_PART_NAME = re.compile(rf"{ENTRY_NAME.pattern}\.\d+-\d+\{PART}")
_LOG, _LOCK = "index.log", "index.lock"
_ABANDONED_S = 3600.0  # a file still being written after an hour is nobody's
_LOCK_WAIT_S, _LOCK_POLL_S = 0.5, 0.005
_RECORD = struct.Struct("<cc2xI16sQd24x")
_KINDS = {"block": b"b", "windows": b"w"}
_NAMES = {code: kind for kind, code in _KINDS.items()}
_AT_A_TIME = 1 << 20  # bytes of the log; a multiple of a record


class FolderBusy(Exception):
    """Another process has held the lock for half a second: it may have been stopped."""


@dataclass(slots=True)
class File:
    size: int
    used_s: float


class FolderIndex:
    """Not thread-safe, but that any thread may ask `files.get`. Methods raise OSError; none stays open."""

    def __init__(self, root: Path, watch: Watch | None = None) -> None:
        """Makes the folder, and looks whether it can be used. `watch` hears of blocks, whoever wrote them."""
        self.root, self._watch = root, watch or Unwatched()
        self.files: OrderedDict[str, File] = OrderedDict()  # least recently used first, as far as we know
        self.num_bytes = 0
        self._generation: bytes = b""  # of the log that we have read
        self._log_end = 0  # bytes of it that we have read
        root.mkdir(parents=True, exist_ok=True)
        os.scandir(root).close()
        with contextlib.suppress(FolderBusy), self._locked(wait_s=0.0):
            pass

    def path(self, name: str) -> Path:
        return self.root / name[:2] / name

    def read_folder(self, now_s: float) -> None:
        """Begin: from the folder itself, or from the log where another process holds the lock for long."""
        try:
            with self._locked(_LOCK_WAIT_S):
                for left in self.root.glob(f"{_LOG}.*{PART}"):
                    left.unlink()
                self._look_anew(now_s)
        except FolderBusy:
            self.catch_up()

    @contextmanager
    def locked(self, now_s: float) -> Generator[None]:
        """What other processes have done until now is known meanwhile. Raises FolderBusy.

        A folder that somebody has cleared, or a log that has gone, is read and logged anew: each process
        would keep the bound for what it has written itself, and all together none.
        """
        with self._locked(_LOCK_WAIT_S):
            if not self._catch_up():
                self._look_anew(now_s)
            yield

    def catch_up(self) -> None:
        """Read what other processes have logged. Needs no lock."""
        self._catch_up()

    def _catch_up(self) -> bool:
        """Whether there is a log."""
        try:
            log = os.open(self.root / _LOG, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            self._read(log)
        finally:
            os.close(log)
        return True

    def _look_anew(self, now_s: float) -> None:
        """The folder itself, and a log of it. The lock is held."""
        self._clear()
        for used_s, name, size in sorted(self._look(now_s)):
            self._put(name, File(size, used_s))
        self._write_log()

    def add(self, name: str, size: int, used_s: float) -> None:
        """An entry has come. The lock is held."""
        file = File(size, used_s)
        self._put(name, file)
        self._append(_record(b"+", name, file))
        if self._log_end > _RECORD.size * (1024 + 4 * len(self.files)):
            self._write_log()

    def drop(self, name: str) -> None:
        """An entry has gone; one that another process counts for longer than it is there does no harm."""
        file = self.files.get(name)
        self.forget(name)
        if file is not None:
            self._append(_record(b"-", name, file))

    def forget(self, name: str) -> None:
        """It is not there; who removed it has told."""
        if self._pop(name):
            self._watch.went(_block_keys([name]))

    def use(self, name: str, used_s: float) -> None:
        """It goes after all others. Other processes ask for the file's time before they evict it."""
        self.files[name].used_s = used_s
        self.files.move_to_end(name)
        os.utime(self.path(name), (used_s, used_s))

    def oldest(self) -> str:
        """The least recently used entry, by whatever process. There must be one."""
        for _ in range(len(self.files)):
            name, file = next(iter(self.files.items()))
            try:
                used_s = self.path(name).stat().st_mtime
            except OSError:
                return name
            if used_s <= file.used_s + 0.001:  # as fine as a file's clock may be
                return name
            file.used_s = used_s
            self.files.move_to_end(name)
        return next(iter(self.files))

    @contextmanager
    def _locked(self, wait_s: float) -> Generator[None]:
        lock = os.open(self.root / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            last_s = time.monotonic() + wait_s
            while not _take(lock):
                if time.monotonic() >= last_s:
                    raise FolderBusy
                time.sleep(_LOCK_POLL_S)
            yield
        finally:
            os.close(lock)  # which ends the lock

    def _read(self, log: int) -> None:
        header = os.pread(log, _RECORD.size, 0)
        if len(header) < _RECORD.size:
            return
        if header != self._generation:  # made anew: all is read again
            self._clear()
            self._generation, self._log_end = header, _RECORD.size
        while len(data := os.pread(log, _AT_A_TIME, self._log_end)) >= _RECORD.size:
            whole = len(data) - len(data) % _RECORD.size
            for start in range(0, whole, _RECORD.size):
                self._apply(data[start : start + _RECORD.size])
            self._log_end += whole

    def _apply(self, record: bytes) -> None:
        sign, kind, crc, key, size, used_s = _RECORD.unpack(record)
        if crc != _checksum(record) or kind not in _NAMES:
            return
        name = f"{key.hex()}.{_NAMES[kind]}"
        if sign == b"-":
            self.forget(name)
        elif name not in self.files:
            self._put(name, File(size, used_s))

    def _append(self, record: bytes) -> None:
        """In one write, which no other process's comes between. Where all before it has been read, it counts
        as read too: an entry that went and came again would lose what has been known of it since."""
        try:
            log = os.open(self.root / _LOG, os.O_WRONLY | os.O_APPEND)
        except FileNotFoundError:  # somebody has cleared the folder
            return
        try:
            num_written = os.write(log, record)
            size = os.fstat(log).st_size
            if num_written < len(record):  # a full disk has cut it
                os.ftruncate(log, size - size % _RECORD.size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if size == self._log_end + len(record):
                self._log_end = size
        finally:
            os.close(log)

    def _write_log(self) -> None:
        """Anew, from what we know. The lock is held."""
        fresh = self.root / f"{_LOG}.{os.getpid()}{PART}"
        header = _sealed(b"#", b"#", uuid4().bytes, 0, 0.0)
        try:
            with fresh.open("wb") as log:
                log.write(header)
                for name, file in self.files.items():
                    log.write(_record(b"+", name, file))
            fresh.replace(self.root / _LOG)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise
        self._generation, self._log_end = header, _RECORD.size * (1 + len(self.files))

    def _put(self, name: str, file: File) -> None:
        was_there = self._pop(name)
        self.files[name] = file
        self.num_bytes += file.size
        if not was_there:
            self._watch.came(_block_keys([name]))

    def _pop(self, name: str) -> bool:
        """Whether it was there."""
        file = self.files.pop(name, None)
        self.num_bytes -= file.size if file is not None else 0
        return file is not None

    def _clear(self) -> None:
        self._watch.went(_block_keys(self.files))
        self.files.clear()
        self.num_bytes = 0

    def _look(self, now_s: float) -> Iterator[tuple[float, str, int]]:
        """Time, name and size of each entry in the folder. What killed writers have left goes."""
        for path in self.root.glob("??/*"):
            is_part = _PART_NAME.fullmatch(path.name) is not None
            if not (is_part or ENTRY_NAME.fullmatch(path.name)) or path.parent.name != path.name[:2]:
                continue
            try:
                status = path.lstat()
            except FileNotFoundError:  # evicted meanwhile
                continue
            if not stat.S_ISREG(status.st_mode):
                continue
            if not is_part:
                yield status.st_mtime, path.name, status.st_size
            elif now_s - status.st_mtime > _ABANDONED_S:
                path.unlink(missing_ok=True)


def _block_keys(names: Iterable[str]) -> list[bytes]:
    """Of the entries among them that are blocks."""
    return [bytes.fromhex(key) for key, _, kind in (name.partition(".") for name in names) if kind == "block"]


def _take(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _record(sign: bytes, name: str, file: File) -> bytes:
    key, _, kind = name.partition(".")
    return _sealed(sign, _KINDS[kind], bytes.fromhex(key), file.size, file.used_s)


def _sealed(sign: bytes, kind: bytes, key: bytes, size: int, used_s: float) -> bytes:
    crc = _checksum(_RECORD.pack(sign, kind, 0, key, size, used_s))
    return _RECORD.pack(sign, kind, crc, key, size, used_s)


def _checksum(record: bytes) -> int:
    """Of all but the checksum itself."""
    return zlib.crc32(record[8:], zlib.crc32(record[:4]))
