"""A network that remembers flows, as one does that translates addresses: rules of nftables, by its messages.

Formats: linux/netfilter/nfnetlink.h and nf_tables.h. Numbers of attributes and messages are the kernel's.
"""

import os
import socket
import struct
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from sandbox.egress import namespaces

_NETFILTER = 12
_SUBSYSTEM, _BEGIN, _END, _ERROR = 10, 0x10, 0x11, 2
_NEW_TABLE, _DELETE_TABLE, _NEW_CHAIN, _NEW_RULE = 0, 2, 3, 6
_REQUEST, _ACKNOWLEDGE, _CREATE, _NESTED = 1, 4, 0x400, 0x8000
_IPV4, _POST_ROUTING, _SOURCE_NAT = 2, 4, 100
_TABLE, _CHAIN = b"dockyard\0", b"out\0"
_HEADER, _FAMILY = struct.Struct("=IHHII"), struct.Struct(">BBH")
_COUNT = Path("/proc/sys/net/netfilter/nf_conntrack_count")


def missing() -> str:
    """Why no network can remember flows here, empty where one can."""
    return "" if _COUNT.exists() else "this kernel tracks no connections"


def remembered(namespace: int) -> int:
    """Flows that a network knows."""
    return namespaces.run_in(namespace, lambda: int(_COUNT.read_text()))


@contextmanager
def tracking(namespace: int) -> Generator[None]:
    """Has a network translate source addresses, until the block ends. OSError where the kernel refuses."""
    hook = _attribute(1, struct.pack(">I", _POST_ROUTING)) + _attribute(2, struct.pack(">i", _SOURCE_NAT))
    masquerade = _attribute(1, b"masq\0") + _attribute(2 | _NESTED, b"")
    chain = (
        _attribute(1, _TABLE), _attribute(3, _CHAIN), _attribute(4 | _NESTED, hook), _attribute(7, b"nat\0"),
    )  # fmt: skip
    rule = (
        _attribute(1, _TABLE), _attribute(2, _CHAIN),
        _attribute(4 | _NESTED, _attribute(1 | _NESTED, masquerade)),
    )  # fmt: skip
    wanted = [(_NEW_TABLE, _attribute(1, _TABLE)), (_NEW_CHAIN, b"".join(chain)), (_NEW_RULE, b"".join(rule))]
    namespaces.run_in(namespace, lambda: _send(wanted))
    try:
        yield
    finally:
        namespaces.run_in(namespace, lambda: _send([(_DELETE_TABLE, _attribute(1, _TABLE))]))


def _send(wanted: list[tuple[int, bytes]]) -> None:
    """As one transaction."""
    batch = _message(_BEGIN, 0, _SUBSYSTEM, b"", _REQUEST)
    for kind, attributes in wanted:
        batch += _message(_SUBSYSTEM << 8 | kind, _IPV4, 0, attributes, _REQUEST | _ACKNOWLEDGE | _CREATE)
    batch += _message(_END, 0, _SUBSYSTEM, b"", _REQUEST)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETFILTER) as kernel:
        kernel.settimeout(10)
        kernel.send(batch)
        for _ in wanted:
            answer = kernel.recv(8192)
            kind, (error,) = _HEADER.unpack_from(answer)[1], struct.unpack_from("=i", answer, _HEADER.size)
            if kind == _ERROR and error != 0:
                raise OSError(-error, f"rules of a network: {os.strerror(-error)}")


def _message(kind: int, family: int, subsystem: int, attributes: bytes, flags: int) -> bytes:
    body = _FAMILY.pack(family, 0, subsystem) + attributes
    return _HEADER.pack(_HEADER.size + len(body), kind, flags, 0, 0) + body


def _attribute(kind: int, data: bytes) -> bytes:
    """Padded to four bytes, which its length does not count."""
    return struct.pack("=HH", 4 + len(data), kind) + data + b"\0" * (-len(data) % 4)
