"""What creates and ends of sandboxes ask of the kernel's routing, in messages of our own (rtnetlink(7)).

Starting `ip` takes longer than all of it, and `ip` asks for every link of the namespace before it takes the
first name: with a link for each sandbox that is a cost of all live ones at every create, under the one lock
that all of the kernel's routing has.
"""

import errno
import os
import socket
import struct
import threading
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from ipaddress import IPv6Network, ip_address

_NEWLINK, _DELLINK, _SETLINK, _NEWADDR, _NEWROUTE, _NEWNEIGH = 16, 17, 19, 20, 24, 28
_REQUEST, _ACKNOWLEDGE, _REPLACE, _EXCLUSIVE, _CREATE = 0x1, 0x4, 0x100, 0x200, 0x400
_HEAD = struct.Struct("=IHHII")  # struct nlmsghdr
_ERROR = 2
_ANSWERS_BYTES = 1 << 16
_PATIENCE_S = 20.0  # for an answer that is there already

_IFLA_ADDRESS, _IFLA_IFNAME, _IFLA_LINKINFO, _IFLA_IFALIAS, _IFLA_AF_SPEC, _IFLA_NET_NS_FD = (
    1,
    3,
    18,
    20,
    26,
    28,
)
_IFLA_QUEUES = (31, 32)  # IFLA_NUM_TX_QUEUES, IFLA_NUM_RX_QUEUES
_INFO_KIND, _INFO_DATA, _VETH_PEER = 1, 2, 1
_ADDR_GEN_MODE, _NONE = 8, b"\1"
_IFF_UP = 1
_IFA_ADDRESS, _IFA_LOCAL, _IFA_F_NODAD = 1, 2, 0x02
_RTA_DST, _RTA_OIF, _RTA_GATEWAY = 1, 4, 5
_TABLE_MAIN, _PROTOCOL_BOOT, _SCOPE_ALL, _SCOPE_LINK, _UNICAST, _ONLINK = 254, 3, 0, 253, 1, 4
_NDA_DST, _NDA_LLADDR, _NUD_PERMANENT = 1, 2, 0x80


@dataclass(frozen=True, slots=True)
class Order:
    """One message: what it is about, for errors, its type and flags, and all behind its head."""

    about: str
    kind: int
    flags: int
    body: bytes


class Routing:
    """A way to the kernel's routing of the network namespace in which this is made; from any thread, and from
    several at a time."""

    def __init__(self) -> None:
        """OSError."""
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self._socket.settimeout(_PATIENCE_S)
        self._lock = threading.Lock()  # guards what follows, and reading
        self._next = 0  # the number of an order
        self._answers: dict[int, int] = {}  # that came to one who waits for another's

    def carry_out(self, orders: Sequence[Order]) -> None:
        """All of them, in their order. OSError of the first that the kernel refuses, FileExistsError where a
        thing is there already; the others are done."""
        with self._lock:
            first, self._next = self._next, self._next + len(orders)
        numbered = {first + number: order for number, order in enumerate(orders)}
        # The kernel carries them out meanwhile, and has answered when this returns: those of other threads
        # wait there no longer than they must.
        self._socket.send(b"".join(_packed(order, number) for number, order in numbered.items()))
        for number, order in numbered.items():
            if error := self._answer(number):
                for rest in numbered.keys() - set(range(first, number + 1)):
                    self._answer(rest)
                raise OSError(error, f"{order.about}: {os.strerror(error)}")

    def _answer(self, number: int) -> int:
        """An order's error, or 0."""
        with self._lock:
            while number not in self._answers:
                self._answers.update(_answers(self._socket.recv(_ANSWERS_BYTES)))
            return self._answers.pop(number)

    def remove(self, ifindex: int) -> None:
        """Deletes a link. One that is gone is no error."""
        try:
            self.carry_out([delete(ifindex)])
        except OSError as error:
            if error.errno != errno.ENODEV:
                raise

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()

    def leave(self) -> None:
        """In a child of a fork."""
        self._lock = threading.Lock()
        self._socket.close()


def carry_out(orders: Sequence[Order]) -> None:
    """In the network namespace that the calling thread is in, as `Routing.carry_out`."""
    with closing(Routing()) as routing:
        routing.carry_out(orders)


def remove(ifindex: int) -> None:
    """In the network namespace that the calling thread is in, as `Routing.remove`."""
    with closing(Routing()) as routing:
        routing.remove(ifindex)


def new_veth(name: str, mac: str, peer: str, peer_mac: str, namespace: int) -> Order:
    """A pair: `name` here, `peer` in that namespace, a descriptor. One queue each: they have little to carry,
    and each queue costs the kernel a folder of files."""
    queues = b"".join(_attribute(kind, struct.pack("=I", 1)) for kind in _IFLA_QUEUES)
    far = (
        _link(0)
        + _text(_IFLA_IFNAME, peer)
        + _attribute(_IFLA_ADDRESS, _mac(peer_mac))
        + _attribute(_IFLA_NET_NS_FD, struct.pack("=I", namespace))
        + queues
    )
    info = _text(_INFO_KIND, "veth") + _attribute(_INFO_DATA, _attribute(_VETH_PEER, far))
    near = _text(_IFLA_IFNAME, name) + _attribute(_IFLA_ADDRESS, _mac(mac)) + queues
    body = _link(0) + near + _attribute(_IFLA_LINKINFO, info)
    return Order(f"make link {name}", _NEWLINK, _CREATE | _EXCLUSIVE, body)


def label(ifindex: int, text: str) -> Order:
    """Its alias, which an audit reads."""
    return Order(f"label link {ifindex}", _SETLINK, 0, _link(ifindex) + _text(_IFLA_IFALIAS, text))


def without_own_address(ifindex: int) -> Order:
    """Before it is up: the kernel then gives it no address by its own hand, and announces none."""
    mode = _attribute(socket.AF_INET6, _attribute(_ADDR_GEN_MODE, _NONE))
    return Order(f"set up link {ifindex}", _SETLINK, 0, _link(ifindex) + _attribute(_IFLA_AF_SPEC, mode))


def up(ifindex: int) -> Order:
    """From now on it carries."""
    return Order(f"link {ifindex} up", _SETLINK, 0, _link(ifindex, _IFF_UP))


def delete(ifindex: int) -> Order:
    """A veth goes with its other end."""
    return Order(f"remove link {ifindex}", _DELLINK, 0, _link(ifindex))


def add_address(ifindex: int, address: str) -> Order:
    """Its own, alone in its network; at once, without a look whether another has it."""
    raw = ip_address(address).packed
    body = struct.pack("=4BI", _family(raw), 8 * len(raw), _IFA_F_NODAD, 0, ifindex)
    body += _attribute(_IFA_LOCAL, raw) + _attribute(_IFA_ADDRESS, raw)
    return Order(f"add address {address}", _NEWADDR, _CREATE | _EXCLUSIVE, body)


def add_route(ifindex: int, address: str) -> Order:
    """That one address lies behind the link."""
    raw = ip_address(address).packed
    body = _route(_family(raw), 8 * len(raw), _SCOPE_LINK if len(raw) == 4 else _SCOPE_ALL, 0)
    body += _attribute(_RTA_DST, raw) + _attribute(_RTA_OIF, struct.pack("=I", ifindex))
    return Order(f"add route to {address}", _NEWROUTE, _CREATE | _EXCLUSIVE, body)


def add_block_route(ifindex: int, block: IPv6Network, hop: str) -> Order:
    """They lie behind that neighbour, which no address of the link says to be near."""
    raw = ip_address(hop).packed
    body = _route(_family(raw), block.prefixlen, _SCOPE_ALL, _ONLINK)
    body += _attribute(_RTA_DST, block.network_address.packed)
    body += _attribute(_RTA_GATEWAY, raw) + _attribute(_RTA_OIF, struct.pack("=I", ifindex))
    return Order(f"add route to {block}", _NEWROUTE, _CREATE | _EXCLUSIVE, body)


def add_default_route(ifindex: int, hop: str) -> Order:
    """All else lies behind that neighbour."""
    raw = ip_address(hop).packed
    body = _route(_family(raw), 0, _SCOPE_ALL, _ONLINK)
    body += _attribute(_RTA_GATEWAY, raw) + _attribute(_RTA_OIF, struct.pack("=I", ifindex))
    return Order(f"add default route via {hop}", _NEWROUTE, _CREATE | _EXCLUSIVE, body)


def put_neighbour(ifindex: int, address: str, mac: str) -> Order:
    """Where an address is, for good: nobody is asked."""
    raw = ip_address(address).packed
    body = struct.pack("=BxxxiHBB", _family(raw), ifindex, _NUD_PERMANENT, 0, 0)
    body += _attribute(_NDA_DST, raw) + _attribute(_NDA_LLADDR, _mac(mac))
    return Order(f"enter neighbour {address}", _NEWNEIGH, _CREATE | _REPLACE, body)


def _packed(order: Order, number: int) -> bytes:
    flags = _REQUEST | _ACKNOWLEDGE | order.flags
    message = _HEAD.pack(_HEAD.size + len(order.body), order.kind, flags, number, 0) + order.body
    return message + bytes(-len(message) % 4)


def _answers(data: bytes) -> Iterable[tuple[int, int]]:
    """The number of each order that is answered, and its error or 0."""
    while data:
        length, kind, _, number, _ = _HEAD.unpack_from(data)
        if kind != _ERROR:
            raise OSError(errno.EPROTO, f"the kernel answers a message of type {kind}")
        (error,) = struct.unpack_from("=i", data, _HEAD.size)
        yield number, -error
        data = data[length + -length % 4 :]


def _attribute(kind: int, value: bytes) -> bytes:
    """struct nlattr."""
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def _text(kind: int, text: str) -> bytes:
    return _attribute(kind, text.encode() + b"\0")


def _mac(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))


def _family(raw: bytes) -> int:
    return socket.AF_INET if len(raw) == 4 else socket.AF_INET6


def _link(ifindex: int, flags: int = 0) -> bytes:
    """struct ifinfomsg: what `flags` has is set, the rest stays."""
    return struct.pack("=BxHiII", socket.AF_UNSPEC, 0, ifindex, flags, flags)


def _route(family: int, prefix: int, scope: int, flags: int) -> bytes:
    """struct rtmsg."""
    return struct.pack("=8BI", family, prefix, 0, 0, _TABLE_MAIN, _PROTOCOL_BOOT, scope, _UNICAST, flags)
