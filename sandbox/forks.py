"""What a forked child lets go of: its parent's sandboxes.

A fork copies descriptors, locks and registries, and none of the threads that serve them. A child that kept a
control socket would keep the sandbox alive after its owner's death, one that asked through it would take
its owner's answers, and a lock that another thread held is never given back. So whatever holds such things
registers here, and the child begins without them.
"""

import itertools
import os
import socket
import threading
import traceback
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Protocol
from weakref import WeakSet, WeakValueDictionary


class Heirloom(Protocol):
    """Something of one process alone."""

    def leave(self) -> None:
        """In a child of a fork, where nothing else runs: lets go of descriptors and begins its locks anew.
        Must not wait, nor touch what it shares with the parent, such as an epoll's list. Idempotent; nobody
        else calls it."""
        ...


_heirlooms: WeakValueDictionary[int, Heirloom] = WeakValueDictionary()  # in the order of their making
_sockets: WeakSet[socket.socket] = WeakSet()
_descriptors: set[int] = set()
_numbers = itertools.count()


def leave_in_children(heirloom: Heirloom) -> None:
    """Calls its `leave` in every child of a fork from now on, for as long as it is there."""
    _heirlooms[next(_numbers)] = heirloom


def close_in_children(sock: socket.socket) -> None:
    """A socket whose other end waits for this process to end."""
    _sockets.add(sock)


@contextmanager
def kept_from_children(fd: int) -> Generator[int]:
    """A descriptor of the block, closed with it: what it holds, memory or a lock, no child keeps."""
    _descriptors.add(fd)
    try:
        yield fd
    finally:
        if fd in _descriptors:
            _descriptors.remove(fd)
            os.close(fd)


def close_left(fd: int | None) -> None:
    """For `leave`: closes what the parent may just have been closing."""
    if fd is not None:
        with suppress(OSError):
            os.close(fd)


def free_in_children(lock: threading.Lock) -> None:
    """A module's own, which guards what parent and child may both go on with as it stands."""
    os.register_at_fork(after_in_child=partial(free, lock))


def free(lock: threading.Lock) -> None:
    """For what is left by a function: another thread of the parent's may have held it."""
    with suppress(RuntimeError):  # nobody did
        lock.release()


def _leave_all() -> None:
    while _descriptors:
        close_left(_descriptors.pop())
    for sock in list(_sockets):
        sock.close()
    for heirloom in list(_heirlooms.values()):
        try:
            heirloom.leave()
        except Exception:  # its own: the others leave all the same
            traceback.print_exc()


os.register_at_fork(after_in_child=_leave_all)
