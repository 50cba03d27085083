"""Packets that may come with descriptors, which no program that is started meanwhile inherits."""

import socket
from array import array
from typing import NamedTuple


class Packet(NamedTuple):
    """Whoever has received it owns the descriptors."""

    data: bytes  # empty at the end
    fds: list[int]
    is_cut: bool  # of the descriptors, since not so many are free here, or were expected


def receive(sock: socket.socket, num_bytes: int, *, num_fds: int = 1, flags: int = 0) -> Packet:
    """One packet, with at most so many descriptors; what is more of either is lost. `flags` as
    for `recv`. OSError."""
    # Not socket.recv_fds, which ignores its flags.
    room = socket.CMSG_LEN(num_fds * array("i").itemsize)
    data, ancillary, found, _ = sock.recvmsg(num_bytes, room, flags | socket.MSG_CMSG_CLOEXEC)
    fds = array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content)
    return Packet(data, fds.tolist(), bool(found & socket.MSG_CTRUNC))
