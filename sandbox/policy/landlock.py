"""Landlock: where a sandbox's processes may write, whatever modes, mounts and owners say.

Init confines itself to the image's writable directories before it serves anything (`native/landlock.c`), so
all that runs in a sandbox shares one domain. Writes to /proc, to /sys and to what an image's root happens to
own are refused by it, and so are device files, wherever they are made.
"""

import ctypes
from functools import cache

from sandbox.errors import UnsupportedError

_CREATE_RULESET, _VERSION_QUERY = 444, 1
COMPLETE_ABI = 5  # the first that covers moves, truncation and device ioctls as well


@cache
def abi() -> int:
    """The kernel's Landlock version; 0 where it has none, or does not use it."""
    libc = ctypes.CDLL(None, use_errno=True)
    return max(0, int(libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION_QUERY)))


def check() -> None:
    """Raises UnsupportedError where the kernel cannot enforce it."""
    if abi() < 1:
        raise UnsupportedError(
            "this kernel does not enforce Landlock, which every sandbox needs",
            capability="landlock",
            hint="use Linux 5.13 or later with `landlock` in the `lsm=` list of its command line",
        )
