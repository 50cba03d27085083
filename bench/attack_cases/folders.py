"""Folders for what the suite makes. What a run that was killed has left, the next one removes."""

import fcntl
import os
import tempfile
import time
import weakref
from contextlib import suppress
from pathlib import Path

from protocol.errors import DockyardError
from sandbox.audit import sweep
from sandbox.host_tree import remove_tree

_PREFIX = "dockyard-attack-"
_NEW_S = 60.0  # its maker may not hold it yet


class Folder:
    """A new one, until `remove` or the end of this object. A lock on it, which goes with the process, says
    that somebody has it still: a pid would not, where several namespaces share a place."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_SH)
        self.remove = weakref.finalize(self, _remove, self.path, fd)


def remove_left() -> None:
    """Removes this user's folders that nobody has, and what sandboxes left that had their state there."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError, DockyardError):  # another's, or gone meanwhile
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                is_old = time.time() - os.fstat(fd).st_mtime > _NEW_S
                if os.fstat(fd).st_uid == os.geteuid() and is_old:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    sweep(path)
                    remove_tree(path)
            finally:
                os.close(fd)


def _remove(path: Path, fd: int) -> None:
    try:
        remove_tree(path)
    finally:
        os.close(fd)
