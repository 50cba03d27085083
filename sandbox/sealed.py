"""A program as a file in memory that nobody can change any more.

An OCI runtime makes such a copy of itself at each start, and starts itself anew from it, so that no sandbox
can write to the program on the host's disk through its /proc. One that is started from a sealed copy leaves
that out. The copy is made once a process, and again when the program has been replaced.
"""

import errno
import fcntl
import os
import threading
from pathlib import Path

from sandbox.errors import is_shortage
from sandbox.forks import free_in_children

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_EXECUTABLE = 0x10  # MFD_EXEC of linux/memfd.h

_Version = tuple[int, int, int]  # inode, time of change, size
_lock = threading.Lock()
free_in_children(_lock)
_copies: dict[str, tuple[_Version, int | None]] = {}  # by path; descriptors stay open: some start may use one


def sealed_copy(program: str) -> int | None:
    """A descriptor of it, which stays this process's; None where the kernel runs no files in memory. OSError
    where the program cannot be read, or no descriptor is free."""
    info = Path(program).stat()
    version = info.st_ino, info.st_mtime_ns, info.st_size
    with _lock:
        if (known := _copies.get(program)) is None or known[0] != version:
            _copies[program] = known = (version, _copy(program))
        return known[1]


def _copy(program: str) -> int | None:
    try:
        fd = _memory_file()
    except OSError as error:
        if is_shortage(error):
            raise
        return None  # of a kernel that is told to run none
    try:
        with Path(program).open("rb") as source:
            while os.sendfile(fd, source.fileno(), None, 1 << 30):
                pass
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _memory_file() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("sealed", flags | _EXECUTABLE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # before Linux 6.3 all may be run
            raise
        return os.memfd_create("sealed", flags)
