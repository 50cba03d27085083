"""Processes and namespaces that a user has made, known by descriptor."""

import os
import struct
from fcntl import ioctl
from pathlib import Path

_USER_OF, _PARENT_OF, _KIND_OF, _OWNER_OF = 0xB701, 0xB702, 0xB703, 0xB704  # ioctl_nsfs(2)
_NEWNET = 0x40000000


class Refused(Exception):
    """Ends a request, no connection. Of a name (bad-record, foreign, not-yours, full, busy) and words."""


def checked_pid(process: int, uid: int) -> int:
    """Of a process whose user namespace this user has made, known by its folder in /proc. OSError where it
    has ended: a folder is of one process for good."""
    if os.fstat(process).st_dev != Path("/proc").stat().st_dev:
        raise Refused("bad-record", "the descriptor is of no process's folder in /proc")
    _check_user_namespace(os.open("ns/user", os.O_RDONLY | os.O_CLOEXEC, dir_fd=process), uid)
    return int(Path(f"/proc/self/fd/{process}/stat").read_text().split(" ")[0])


def check_network(namespace: int, uid: int) -> None:
    """It is a network, of a user namespace that this user has made. OSError where it is no namespace."""
    if ioctl(namespace, _KIND_OF) != _NEWNET:
        raise Refused("bad-record", "the descriptor is of no network namespace")
    _check_user_namespace(ioctl(namespace, _USER_OF), uid)


def _check_user_namespace(namespace: int, uid: int) -> None:
    """Closes it. Our own, and one that is no child of our own, are not a user's to give away."""
    parent = maker = -1
    try:
        (maker,) = struct.unpack("=I", ioctl(namespace, _OWNER_OF, bytes(4)))
        parent = ioctl(namespace, _PARENT_OF)
        is_child = os.path.samestat(os.fstat(parent), Path("/proc/self/ns/user").stat())
    except PermissionError:  # of PARENT_OF: it is our own
        is_child = False
    finally:
        for fd in {namespace, parent} - {-1}:
            os.close(fd)
    if not is_child or maker != uid:
        raise Refused("not-yours", f"it is in no user namespace that uid {uid} has made here")
