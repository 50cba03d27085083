"""What a machine believes of its neighbours on a link: addresses by ARP and neighbour discovery, and who asks
for an address by DHCP. Frames as only one who has left a sandbox's bounds could send them: the host's
root sends them, from the sandbox's own network.
"""

import json
import os
import socket
import struct
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from bench.attack_cases import plain_link
from bench.attack_cases.arena import Arena
from bench.attack_cases.model import Box, Seen
from bench.attack_cases.world import HOST
from sandbox import Sandbox
from sandbox.egress import namespaces
from sandbox.journal import Journal

# Addresses of others that the sender claims, and one that the world has on the link.
_CLAIMED, _CLAIMED_6, _OURS_6 = "203.0.113.9", "2001:db8:9::9", "2001:db8:9::1"
_BROADCAST, _HOST_MAC, _OWN_MAC = (
    bytes([255] * 6),
    bytes.fromhex("02646b790001"),
    bytes.fromhex("02646b790002"),
)
_ARP, _IP, _IP_6 = 0x0806, 0x0800, 0x86DD
_UDP, _ICMP_6, _SOLICITATION = 17, 58, 135
_DHCP_CLIENT, _DHCP_SERVER = 68, 67


def announced(arena: Arena, box: Box) -> Seen:
    """From a sandbox's network. Open where the world believes anything of it."""
    with arena.sandbox(box) as sandbox, _namespace_of(arena, sandbox) as namespace:
        address = namespaces.run_in(namespace, _own_address)
        route = namespaces.run_in(arena.world.namespace, lambda: _ip("-6", "route", "get", address))
        return _announce(arena, namespace, route[0]["dev"])


def announced_unfenced(arena: Arena) -> Seen:
    """From a network with a link to the world at whose end no fence is."""
    inner = namespaces.new_namespace()
    try:
        plain_link.make(arena.world.namespace, inner)
        return _announce(arena, inner, plain_link.NAME)
    finally:
        os.close(inner)  # and the link goes with it


def _announce(arena: Arena, namespace: int, device: str) -> Seen:
    world = arena.world.namespace
    namespaces.configure(world, [f"address add {_OURS_6}/128 dev {device} nodad"])
    server = namespaces.run_in(world, _dhcp_server)
    with server:
        namespaces.run_in(namespace, _send_all)
        namespaces.run_in(namespace, _talk)  # behind them: it has passed when all of them have, or have not
        neighbours = namespaces.run_in(world, lambda: _ip("neighbour", "show"))
        believed = sorted({each["dst"] for each in neighbours} & {_CLAIMED, _CLAIMED_6})
        try:
            asked = [server.recv(2048).decode()]
        except BlockingIOError:
            asked = []
    namespaces.configure(world, [f"address delete {_OURS_6}/128 dev {device}"])
    found = " ".join((*believed, *asked))
    return Seen(bool(found), f"believed: {found}" if found else "nothing was believed")


def _dhcp_server() -> socket.socket:
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    server.bind(("", _DHCP_SERVER))
    return server


def _send_all() -> None:
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as wire:
        wire.bind(("eth0", 0))
        for frame in (_arp_request(), _solicitation(), _discover()):
            wire.send(frame)


def _talk() -> None:
    """As rules of the sandbox allow: the link works."""
    with socket.create_connection((HOST, 80), 10) as peer:
        peer.recv(16)


def _arp_request() -> bytes:
    """Who has an address of the world's; and by the way, the claimed one is here."""
    head = struct.pack(">HHBBH", 1, _IP, 6, 4, 1)
    asked = _OWN_MAC + socket.inet_aton(_CLAIMED) + bytes(6) + socket.inet_aton(HOST)
    return _BROADCAST + _OWN_MAC + struct.pack(">H", _ARP) + head + asked


def _solicitation() -> bytes:
    """The same in version 6 (RFC 4861), with the option that says where the sender is."""
    source, target = (socket.inet_pton(socket.AF_INET6, each) for each in (_CLAIMED_6, _OURS_6))
    body = struct.pack(">BBHI", _SOLICITATION, 0, 0, 0) + target + bytes([1, 1]) + _OWN_MAC
    counted = source + target + struct.pack(">II", len(body), _ICMP_6) + body
    body = body[:2] + struct.pack(">H", _checksum(counted)) + body[4:]
    head = struct.pack(">IHBB", 6 << 28, len(body), _ICMP_6, 255) + source + target
    return _HOST_MAC + _OWN_MAC + struct.pack(">H", _IP_6) + head + body


def _discover() -> bytes:
    """Of no address yet, to everybody (RFC 2131)."""
    data = b"discover"
    udp = struct.pack(">HHHH", _DHCP_CLIENT, _DHCP_SERVER, 8 + len(data), 0) + data
    head = struct.pack(">BBHHHBBH", 0x45, 0, 20 + len(udp), 0, 0, 64, _UDP, 0) + bytes(4) + bytes([255] * 4)
    head = head[:10] + struct.pack(">H", _checksum(head)) + head[12:]
    return _BROADCAST + _OWN_MAC + struct.pack(">H", _IP) + head + udp


def _checksum(data: bytes) -> int:
    """RFC 1071; of an even number of bytes."""
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


@contextmanager
def _namespace_of(arena: Arena, box: Sandbox) -> Generator[int]:
    (record,) = (each for each in Journal(arena.state_dir).records() if each.id == box.id)
    fd = os.open(f"/proc/{record.processes[-1].pid}/ns/net", os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def _own_address() -> str:
    """Of version 6: of the other, the world has a route to each."""
    (found,) = (each for each in _ip("-6", "address") if each["ifname"] == "eth0")
    return found["addr_info"][0]["local"]


def _ip(*words: str) -> list[dict[str, Any]]:
    return json.loads(subprocess.check_output(["ip", "-json", *words]))
