"""Lines at the end of a file that others append to as well, and that a full disk or a kill may cut short."""

import errno
import os
from pathlib import Path


def append_line(fd: int, line: bytes) -> None:
    """Writes it, with the newline that it has at its end, as a line of its own: where a line before it was
    cut short, whoever's it was, it would be the end of that one, and is written once more. `fd` is open for
    reading and at the file's end. OSError where it is cut short itself; what there is of it is no line."""
    while True:
        if os.write(fd, line) < len(line):
            path = Path(f"/proc/self/fd/{fd}").readlink()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        # Only now: another process may be cut short between any look and a write. The place is this write's.
        start = os.lseek(fd, 0, os.SEEK_CUR) - len(line)
        if start == 0 or os.pread(fd, 1, start - 1) == b"\n":
            return
