"""Files in memory, which have no name and end with their last descriptor."""

import os


def memory_file(content: bytes | memoryview = b"") -> int:
    """A descriptor of one with that content, to be read from its start; the caller's. OSError."""
    fd = os.memfd_create("dockyard", os.MFD_CLOEXEC)
    try:
        if content:
            os.pwrite(fd, content, 0)  # which leaves its reader at the start
    except BaseException:
        os.close(fd)
        raise
    return fd
