"""Ranges of ids for sandboxes whose owner is root: each is one sandbox's, whichever process has it.

A range is held by a lock on one byte of a file, which ends with the process. Helpers for ordinary users have
others (sandbox/privileged/ranges.py).
"""

import errno
import fcntl
import os
import secrets
import struct
import threading
from contextlib import suppress
from itertools import chain
from pathlib import Path

from sandbox.errors import CapacityError
from sandbox.forks import close_left, free_in_children, leave_in_children
from sandbox.substrates.base import UIDS_A_SANDBOX

# Between SSSD's ids for users of a directory (to 2,000,200,000) and systemd's for files of others (from
# 0x7ffe0000): nobody's by custom. bubblewrap takes none from 0x80000000 on.
_FIRST_ID, _LAST_ID = 0x78000000, 0x7FFE0000
# Where these are all taken: what nspawn has for containers, above shadow's subordinate ids (to 600,100,000).
_FIRST_MORE, _LAST_MORE = 0x24000000, 0x6FFF0000
_LOCK = struct.Struct("=hh4xqqi4x")  # struct flock
_BOOK = Path("/run/dockyard/ids-of-root")


class RootRanges:
    """Thread-safe. `draw` and `give_back` cost some microseconds."""

    def __init__(self, book: Path = _BOOK) -> None:
        """OSError where the book cannot be opened."""
        with suppress(FileExistsError):
            book.parent.mkdir(parents=True)
            book.parent.chmod(0o755)  # whatever the umask: helpers have their sockets there, for their users
        self._book: int | None = os.open(book, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._lock = threading.Lock()
        # A lock does not keep out who has it. Apart, so that a full stretch is not looked through each time.
        self._held: tuple[set[int], set[int]] = set(), set()
        leave_in_children(self)

    def draw(self) -> int:
        """The first id of a range that no other sandbox of root's has. CapacityError where all are taken."""
        with self._lock:
            stretches = (_FIRST_ID, _LAST_ID), (_FIRST_MORE, _LAST_MORE)
            for (start, end), held in zip(stretches, self._held, strict=True):
                if len(held) == (end - start) // UIDS_A_SANDBOX:
                    continue
                for first in _around(start, end):
                    if first not in held and self._set(first, fcntl.F_WRLCK):
                        held.add(first)
                        return first
        raise CapacityError("every range of ids is a sandbox's", hint="end other sandboxes of this host")

    def give_back(self, first: int) -> None:
        """Once nothing of the sandbox is left. Idempotent."""
        with self._lock:
            for held in self._held:
                if first in held:
                    held.remove(first)
                    self._set(first, fcntl.F_UNLCK)

    def close(self) -> None:
        """Gives back all. Idempotent."""
        book, self._book = self._book, None
        if book is not None:
            os.close(book)

    def leave(self) -> None:
        """In a child of a fork: what is held stays the parent's, whose locks these are."""
        self._lock, self._held = threading.Lock(), (set(), set())
        book, self._book = self._book, None
        close_left(book)

    def _set(self, first: int, kind: int) -> bool:
        if self._book is None:
            return False
        request = _LOCK.pack(kind, os.SEEK_SET, first // UIDS_A_SANDBOX, 1, 0)
        try:
            fcntl.fcntl(self._book, fcntl.F_OFD_SETLK, request)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True


def shared_root_ranges() -> RootRanges:
    """The one of this process, made at the first use; a forked child has its own, since locks of one opened
    file do not keep each other out. OSError."""
    with _shared_lock:
        for pid in _shared.keys() - {os.getpid()}:
            _shared.pop(pid).close()
        if not _shared:
            _shared[os.getpid()] = RootRanges()
        return _shared[os.getpid()]


_shared: dict[int, RootRanges] = {}
_shared_lock = threading.Lock()
free_in_children(_shared_lock)


def _around(first: int, last: int) -> "chain[int]":
    """All ranges between, from one of them on: neither the same ones each time nor all tried for each."""
    start = first + UIDS_A_SANDBOX * secrets.randbelow((last - first) // UIDS_A_SANDBOX)
    return chain(range(start, last, UIDS_A_SANDBOX), range(first, start, UIDS_A_SANDBOX))
