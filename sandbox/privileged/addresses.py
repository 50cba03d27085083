"""The machine's own addresses, and word of each change (rtnetlink(7))."""

import os
import socket
import struct
from collections.abc import Iterator
from ipaddress import ip_address, ip_interface

_ERROR, _DONE, _NEWADDR, _GETADDR = 2, 3, 20, 22
_REQUEST, _DUMP = 0x1, 0x300
_BOTH_VERSIONS = 0x10 | 0x100  # RTMGRP_IPV4_IFADDR, RTMGRP_IPV6_IFADDR
_ADDRESS, _LOCAL, _BROADCAST = 1, 2, 4
_HEAD, _ABOUT, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=4BI"), struct.Struct("=HH")
_MOST_BYTES = 1 << 20


class Addresses:
    """Of the network namespace in which it is made, from any thread. OSError."""

    def __init__(self) -> None:
        self._changes, self._questions = (
            socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) for _ in range(2)
        )
        self._number = 0
        self._changes.setblocking(False)
        self._changes.bind((0, _BOTH_VERSIONS))
        self.fileno = self._changes.fileno  # readable when `current` may have changed

    def current(self) -> tuple[str, ...]:
        """All that there are now, with those that it answers to beside them: a network's broadcast address,
        and of version 6 the first one of a network, which is any router's."""
        self._hear_changes()  # first: what changes meanwhile is heard again
        self._number += 1  # of the question: what is left of an answer to one before is not this one's
        request = _ABOUT.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        head = _HEAD.pack(_HEAD.size + len(request), _GETADDR, _REQUEST | _DUMP, self._number, 0)
        self._questions.send(head + request)
        found: list[str] = []
        while True:
            for kind, body in _messages(self._questions.recv(_MOST_BYTES), self._number):
                if kind == _NEWADDR:
                    found += _addresses(body)
                elif kind in (_DONE, _ERROR):
                    (error,) = struct.unpack_from("=i", body)
                    if error:
                        raise OSError(-error, f"list this machine's addresses: {os.strerror(-error)}")
                    return tuple(found)

    def close(self) -> None:
        """Idempotent."""
        self._changes.close()
        self._questions.close()

    leave = close  # in a child of a fork

    def _hear_changes(self) -> None:
        for _ in range(1 << 16):
            try:
                self._changes.recv(_MOST_BYTES)
            except BlockingIOError:
                return
            except OSError:  # some did not fit, and have been dropped
                continue


def _messages(data: bytes, asked: int) -> Iterator[tuple[int, bytes]]:
    while data:
        length, kind, _, number, _ = _HEAD.unpack_from(data)
        if number == asked:
            yield kind, data[_HEAD.size : length]
        data = data[length + -length % 4 :]


def _addresses(body: bytes) -> list[str]:
    """The machine's own, which on a point-to-point link is not the other attribute's."""
    found, rest = dict[int, bytes](), body[_ABOUT.size :]
    while rest:
        length, kind = _ATTRIBUTE.unpack_from(rest)
        found[kind] = rest[_ATTRIBUTE.size : length]
        rest = rest[length + -length % 4 :]
    own, beside = ip_address(found.get(_LOCAL) or found[_ADDRESS]), {found.get(_BROADCAST)}
    net = ip_interface((own, _ABOUT.unpack_from(body)[1])).network
    if own.version == 6:
        beside = {net.network_address.packed}
    elif net.prefixlen < 31:  # of some kernels the first address, too
        beside |= {net.network_address.packed, net.broadcast_address.packed}
    return [str(own), *(str(ip_address(each)) for each in beside if each is not None)]
