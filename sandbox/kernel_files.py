"""Small files of the kernel's, in cgroups and /proc: one call opens, one reads or writes, one closes. A file
object takes twice as many, and each is a moment at which another thread takes the interpreter."""

import os
from pathlib import Path

_MOST_BYTES = 4096  # of a file that is read at once; the kernel writes such a one as a whole


def read_small(path: str | Path) -> str:
    """All of it, up to a page. OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, _MOST_BYTES).decode(errors="replace")
    finally:
        os.close(fd)


def write_small(path: str | Path, text: str, *, makes: bool = True) -> None:
    """In one write. OSError; FileNotFoundError without `makes` where it is not there."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | (os.O_CREAT if makes else 0))
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
