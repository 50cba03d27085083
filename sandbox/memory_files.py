"""Files in memory, which have no name and end with their last descriptor."""

import os


def memory_file(content: bytes | memoryview = b"") -> int:
    """A descriptor of one with that content, to be read from its start; the caller's. OSError, also where a
    limit (`ulimit -f`) cuts it short."""
    fd = os.memfd_create("dockyard", os.MFD_CLOEXEC)
    try:
        whole, written = memoryview(content), 0
        while written < len(whole):  # the write behind one that was cut short says why
            written += os.pwrite(fd, whole[written:], written)  # which leaves its reader at the start
    except BaseException:
        os.close(fd)
        raise
    return fd
