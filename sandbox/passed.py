"""Packets that may come with descriptors, which no program that is started meanwhile inherits.

Whoever closes a socket last may have to wait for what lies in it, for as long as whoever made it likes
(SO_LINGER), and so may whoever closes one in which others lie. Those of a sandbox that is not ours any more
are closed on a thread of their own, for which nobody waits.
"""

import os
import socket
import stat
from array import array
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from protocol.threads import NoThread, TimelyThread

_MOST_FDS = 253  # of a packet, and no more are left to the kernel to close: SCM_MAX_FD of include/net/scm.h
_CREDENTIALS_BYTES = 12  # struct ucred


class Packet(NamedTuple):
    """Whoever has received it owns the descriptors."""

    data: bytes  # empty at the end
    fds: list[int]
    is_cut: bool  # of the descriptors, since not so many are free here, or were expected


def receive(sock: socket.socket, num_bytes: int, *, num_fds: int = 1, flags: int = 0) -> Packet:
    """One packet, with at most so many descriptors; what is more of either is lost. `flags` as
    for `recv`. OSError."""
    # Not socket.recv_fds, which ignores its flags.
    room = socket.CMSG_LEN(_MOST_FDS * array("i").itemsize)
    data, ancillary, found, _ = sock.recvmsg(num_bytes, room, flags | socket.MSG_CMSG_CLOEXEC)
    given = array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            given.frombytes(content)
    fds, too_many = given.tolist()[:num_fds], given.tolist()[num_fds:]
    is_cut = bool(too_many or found & socket.MSG_CTRUNC)
    let_go(too_many)
    return Packet(data, fds, is_cut)


def let_go(fds: list[int]) -> None:
    """Closes them, each once, whatever comes between: its number may be a stranger's next."""
    while fds:
        close = partial(os.close, fd := fds.pop())
        _apart(close) if is_socket(fd) else close()


def is_socket(fd: int) -> bool:
    """Rather than a name that one has in a file system, opened by O_PATH."""
    return stat.S_ISSOCK(os.fstat(fd).st_mode) and not Path(f"/proc/self/fd/{fd}").readlink().is_absolute()


def hang_up(sock: socket.socket) -> None:
    """Closes a connection, with what lies in it unread. Idempotent."""
    if sock.fileno() < 0:
        return
    with suppress(OSError):  # the other end may have gone
        sock.shutdown(socket.SHUT_RDWR)
    _apart(sock.close) if _has_unread(sock) else sock.close()


def _has_unread(sock: socket.socket) -> bool:
    """Every packet has its sender's credentials, also an empty one, and the end has none."""
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        room, flags = socket.CMSG_SPACE(_CREDENTIALS_BYTES), socket.MSG_PEEK | socket.MSG_DONTWAIT
        data, credentials, _, _ = sock.recvmsg(1, room, flags)
        return bool(data or credentials)
    return False


def _apart(close: Callable[[], None]) -> None:
    try:
        TimelyThread(close, name="dockyard-close").begin()
    except NoThread:
        close()
