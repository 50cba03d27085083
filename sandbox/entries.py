"""What a directory of a sandbox holds, read through a descriptor that its init has opened.

The owner resolves no path: it looks at what is open, or at single names that the kernel listed, and follows
no link. Init opened it under all that confines the sandbox.
"""

import ctypes
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

EntryType = Literal["file", "dir", "link", "other"]
_TYPES: dict[int, EntryType] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "dir",
    stat.S_IFLNK: "link",
}
_READ_BYTES = 1 << 20
MAX_LISTED = 100_000  # entries of a directory
MAX_LISTED_BYTES = 32 << 20  # of their names and of where links lead
# From linux/magic.h: proc, sysfs, cgroup of both versions, mqueue, namespaces.
_SPEAKING = frozenset({0x9FA0, 0x62656572, 0x27E0EB, 0x63677270, 0x19800202, 0x6E736673})
_STATFS_BYTES = 256  # more than any; the type comes first

_libc = ctypes.CDLL(None, use_errno=True)


class TooMuch(Exception):
    """A directory has more in it than its owner would keep in memory."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in a directory of a sandbox. `target` is set for links only. Names need not be UTF-8: they use
    surrogateescape, as in `os`."""

    name: str
    type: EntryType
    size: int
    mode: int
    modified_ns: int
    target: str = ""


def describe(fd: int, name: str) -> Entry:
    """The entry that `fd` (opened with O_PATH) is, under a name of the caller's."""
    return _entry(name, os.fstat(fd), fd, "")


def list_directory(fd: int) -> Iterator[Entry]:
    """In no order. What goes away or becomes something else meanwhile is left out. TooMuch beyond MAX_LISTED
    or MAX_LISTED_BYTES: hard links cost a sandbox next to nothing."""
    left, left_bytes = MAX_LISTED, MAX_LISTED_BYTES
    with os.scandir(fd) as found:
        for item in found:
            with suppress(OSError):
                entry = _entry(item.name, item.stat(follow_symlinks=False), fd, item.name)
                left, left_bytes = left - 1, left_bytes - len(entry.name) - len(entry.target)
                if left < 0 or left_bytes < 0:
                    raise TooMuch
                yield entry


def is_regular(fd: int) -> bool:
    """Whether reading it cannot wait for anyone."""
    return stat.S_ISREG(os.fstat(fd).st_mode)


def speaks(fd: int) -> bool:
    """Whether it is the kernel that answers, and not the same to everyone: much of /proc says what holds for
    whoever reads (host name, groups, process ids) and shows what the reader may see. The owner may see more
    than the sandbox."""
    record = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.fstatfs(fd, record) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return ctypes.c_long.from_buffer(record).value & 0xFFFFFFFF in _SPEAKING


def read_regular(fd: int, max_bytes: int) -> bytes | None:
    """All of a regular file; None when there is more than `max_bytes`."""
    pieces, left = list[bytes](), max_bytes + 1
    while left > 0 and (piece := os.read(fd, min(left, _READ_BYTES))):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces) if left > 0 else None


def _entry(name: str, info: os.stat_result, at: int, link: str) -> Entry:
    kind = _TYPES.get(stat.S_IFMT(info.st_mode), "other")
    target = os.readlink(link, dir_fd=at) if kind == "link" else ""
    return Entry(name, kind, info.st_size, stat.S_IMODE(info.st_mode), info.st_mtime_ns, target)
