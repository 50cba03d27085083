"""What no policy of any sandbox overrides, as entries of the programs' map of denials."""

import struct
from collections.abc import Iterable
from ipaddress import IPv4Network, IPv6Network, ip_network

Net = IPv4Network | IPv6Network
# Own loopback (which never is on the wire), link-local with the clouds' metadata, more metadata, and forms of
# version 6 that hide a version 4 address.
NOWHERE = (
    *("0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "240.0.0.0/4"),
    *("100.100.100.200/32", "168.63.129.16/32", "192.0.0.192/32"),
    *("::/96", "fe80::/10", "ff00::/8", "2001::/32", "2002::/16", "64:ff9b:1::/48"),
    *("fd00:ec2::/32", "fd20:ce::254/128"),
)
# Of this machine's own addresses: ssh, docker and etcd, Ray, Kubernetes.
CONTROL_PORTS = (
    *((22, 22), (2375, 2380), (6379, 6379), (6443, 6443), (8265, 8265), (10001, 10001), (10250, 10250)),
)
# Other sandboxes: of the range for tests between networks (RFC 2544), which nobody routes, and a site of our
# own (RFC 4193).
POOL_4, POOL_6 = IPv4Network("198.18.0.0/15"), IPv6Network("fd6b:79d0:5bc1::/64")
NUMBERS = range(1 << 16, POOL_4.num_addresses - 1)  # of the helper's links; below are those of trunks
_MAPPED, _NAT64 = bytes(10) + b"\xff\xff", bytes.fromhex("0064ff9b0000000000000000")
_ENTRY_BYTES = 136  # struct entry of egress.bpf.c: two words and eight ranges


def entries(own: Iterable[str]) -> dict[bytes, bytes]:
    """Keys and values, where these are the machine's addresses."""
    nets = [*map(ip_network, NOWHERE), POOL_4, POOL_6]
    found = {_key(net): _value([(0, 65535)]) for net in nets}
    for address in map(ip_network, own):  # the longest prefix alone holds, so none within a wider denial
        if not any(address.version == net.version and address.subnet_of(net) for net in nets):  # pyright: ignore[reportArgumentType]
            found[_key(address)] = _value(CONTROL_PORTS)
    return found


def _key(net: Net) -> bytes:
    packed = net.network_address.packed
    length = net.prefixlen + 8 * (16 - len(packed))
    if packed[:-4] in (b"", _NAT64):  # the programs turn both into this before they look
        packed = _MAPPED + packed[-4:]
    return struct.pack("=I", length) + packed


def _value(ports: Iterable[tuple[int, int]]) -> bytes:
    ranges = [struct.pack("=QHHBxxx", 0, *each, 0) for each in ports]  # for ever, of any protocol
    return (struct.pack("=II", len(ranges), 0) + b"".join(ranges)).ljust(_ENTRY_BYTES, b"\0")
