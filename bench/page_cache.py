"""Memory for a process to read files with: a cgroup that bounds it, or pages dropped by hand."""

import ctypes
import mmap
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from sandbox import cgroups

_LIMITS = {1: "memory.limit_in_bytes", 2: "memory.max"}


@contextmanager
def memory_group(limit_bytes: int) -> Generator[Path | None]:
    """An empty cgroup for a process to join, page cache included in its limit; None where none can be made.

    Whoever is left in it at the end is killed.
    """
    group = _make(limit_bytes)
    try:
        yield group
    finally:
        if group is not None:
            cgroups.remove_group(group)


def _make(limit_bytes: int) -> Path | None:
    for hierarchy in cgroups.find_hierarchies():
        if "memory" not in hierarchy.controllers:
            continue
        group = hierarchy.root / f"dockyard-bench-{os.getpid()}"
        try:
            group.mkdir()
            (group / _LIMITS[hierarchy.version]).write_text(str(limit_bytes))
        except OSError:  # not ours to make, or a controller that is not handed down
            cgroups.remove_group(group)
            continue
        return group
    return None


def drop_pages(folder: Path) -> None:
    """Let the system forget what it has of the folder's files: this process's mappings, then the cache."""
    for path in folder.iterdir():
        _advise(path, mmap.MADV_DONTNEED)  # pages that were not written to come back from the file
        handle = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def _advise(path: Path, advice: int) -> None:
    library = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(f" {path.resolve()}"):
            start, stop = (int(address, 16) for address in line.split(" ", 1)[0].split("-"))
            library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), advice)
