"""Folders that other processes change while this one looks: what has just gone is not there."""

import errno
import os
import stat
import time
from collections.abc import Generator, Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path


def list_folder(folder: Path, pattern: str = "*") -> list[Path]:
    """What is in it, by name; nothing where there is no such folder, any more, or another user's link to one.
    OSError where it cannot be read."""
    try:
        _check_link(folder)
        return sorted(path for path in folder.iterdir() if fnmatchcase(path.name, pattern))
    except (FileNotFoundError, NotADirectoryError):
        return []


@contextmanager
def pinned(folder: Path) -> Generator[Path]:
    """A name for a folder that stays its own while the block runs: whoever may write above it may put another
    there. OSError where there is none, or another user's link."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _check_link(folder)
        yield Path(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _check_link(folder: Path) -> None:
    """Raises NotADirectoryError for a link that another user has made, which may lead anywhere."""
    info = folder.lstat()
    if stat.S_ISLNK(info.st_mode) and info.st_uid not in (0, os.geteuid()):
        raise NotADirectoryError(errno.ENOTDIR, "it is another user's link", str(folder))


def owned(paths: Iterable[Path], users: Set[int]) -> Iterator[Path]:
    """Those that are themselves, or as links, one of these users'; what has gone is nobody's."""
    for path in paths:
        with suppress(OSError):
            if path.lstat().st_uid in users:
                yield path


def age_s(path: Path) -> float:
    """Since it, or a link itself, was changed last; 0 where there is none, any more."""
    try:
        return time.time() - path.lstat().st_mtime
    except (FileNotFoundError, NotADirectoryError):
        return 0.0
