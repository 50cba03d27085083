"""What a directory of a sandbox holds, read through a descriptor that its init has opened.

The owner resolves no path: it looks at what is open, or at single names that the kernel listed, and follows
no link. Init opened it under all that confines the sandbox.
"""

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
    """In no order. What goes away or becomes something else meanwhile is left out."""
    with os.scandir(fd) as found:
        for item in found:
            with suppress(OSError):
                yield _entry(item.name, item.stat(follow_symlinks=False), fd, item.name)


def is_regular(fd: int) -> bool:
    """Whether reading it cannot wait for anyone."""
    return stat.S_ISREG(os.fstat(fd).st_mode)


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
