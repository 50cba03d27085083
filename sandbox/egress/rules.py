"""A policy's destinations as entries of the kernel's longest-prefix maps. Pure.

All addresses are 128 bits wide: version 4 is written as ::ffff:a.b.c.d, and the programs turn NAT64 forms
into that before they look. The kernel takes the entry with the longest prefix and no other, so an entry holds
the ports of every rule that covers it. A rule wider than a private range does not reach into it: there the
compiled table has an entry of its own with what was written for that range. Each of the machine's own
addresses (`own`) is like such a range, of one address: whatever listens there is the machine's business.
"""

import struct
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from itertools import chain

from sandbox.errors import InvalidArgument
from sandbox.policy import Network
from sandbox.privileged.denials import NOWHERE, POOL_4, POOL_6

MAX_RANGES = 8  # of ports in one entry; egress.bpf.c has the same number
FOREVER = 0
_MAPPED = 0xFFFF << 32
_NAT64 = 0x0064FF9B << 64  # of 64:ff9b::/96, without the last 32 bits
_PROTOCOLS = {"tcp": 6, "udp": 17, "any": 0}
_RANGE = struct.Struct("=QHHBxxx")  # until (monotonic ns), first, last, protocol
_ENTRY = struct.Struct("=II")  # number of ranges, whether they are clear of the node's denials


@dataclass(frozen=True, slots=True, order=True)
class Prefix:
    """The first `length` bits of a 128-bit address."""

    value: int
    length: int

    def covers(self, other: "Prefix") -> bool:
        """True for itself and what lies in it."""
        return self.length <= other.length and (self.value ^ other.value) >> (128 - self.length) == 0

    def packed(self) -> bytes:
        """Network order, as in the maps."""
        return self.value.to_bytes(16, "big")


@dataclass(frozen=True, slots=True, order=True)
class Ports:
    """Ports of one protocol (6, 17; 0 is any), until a monotonic time or for ever."""

    first: int
    last: int
    protocol: int
    until_ns: int = FOREVER


@dataclass(frozen=True, slots=True)
class Rule:
    """These ports of these addresses."""

    prefix: Prefix
    ports: Ports


Table = dict[Prefix, tuple[Ports, ...]]
Own = frozenset[Prefix]  # the machine's addresses, each of full length
NONE_OWN: Own = frozenset()


def prefix_of(text: str | IPv4Network | IPv6Network | IPv4Address | IPv6Address) -> Prefix:
    """Of an address or network, in text or not; mapped and NAT64 forms become the version 4 that they are."""
    net = ip_network(text)
    value = int(net.network_address)
    if isinstance(net, IPv4Network):
        return Prefix(_MAPPED | value, 96 + net.prefixlen)
    if net.prefixlen >= 96 and value >> 32 == _NAT64:
        value = _MAPPED | value & 0xFFFFFFFF
    return Prefix(value, net.prefixlen)


def address_text(packed: bytes) -> str:
    """Of 16 bytes as the maps have them: version 4 in its own notation."""
    value = int.from_bytes(packed, "big")
    return str(ip_address(value & 0xFFFFFFFF) if value >> 32 == 0xFFFF else IPv6Address(value))


# Keeps version 4 out of rules such as ::/0.
_VERSION_4 = "::ffff:0:0/96"
# Ranges that a wider rule does not reach into, and that no name may resolve to.
PRIVATE: tuple[Prefix, ...] = tuple(
    map(
        prefix_of,
        (
            *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
            *("192.0.0.0/24", "192.168.0.0/16", "198.18.0.0/15", "224.0.0.0/4", "240.0.0.0/4"),
            *("::/96", "64:ff9b:1::/48", "2001::/32", "2002::/16", "fc00::/7", "fe80::/10", "ff00::/8"),
        ),
    )
)
_ZONES = (prefix_of(_VERSION_4), *PRIVATE)

EVERY_PORT = Ports(0, 65535, _PROTOCOLS["any"])
_NOWHERE = tuple(map(prefix_of, (*NOWHERE, POOL_4, POOL_6)))


def _is_nowhere(place: Prefix) -> bool:
    return any(zone.covers(place) for zone in _NOWHERE)


def is_private(address: Prefix) -> bool:
    """Whether no name may resolve to it."""
    return any(zone.covers(address) for zone in PRIVATE)


def rules_of(network: Network) -> tuple[Rule, ...]:
    """The rules of a policy's destinations; names add theirs when they resolve."""
    return tuple(
        Rule(prefix_of(each.to), Ports(first, last, _PROTOCOLS[each.protocol]))
        for each in network.destinations
        for first, last in each.ranges()
    )


def name_ports(ranges: Iterable[tuple[int, int]], protocol: str, until_ns: int) -> tuple[Ports, ...]:
    """Ports of a resolved name."""
    return tuple(Ports(first, last, _PROTOCOLS[protocol], until_ns) for first, last in ranges)


def own_prefixes(addresses: Iterable[str]) -> Own:
    """Of the machine's addresses, but for those where no policy leads anyway (the loopback, link-local)."""
    return frozenset(prefix for each in addresses if not _is_nowhere(prefix := prefix_of(each)))


def check_own_ports(network: Network, own: Own, denied: Iterable[tuple[int, int]]) -> None:
    """InvalidArgument where a destination is an own address and no port of it but ones that are denied to
    all, whatever a policy says: nobody would ever reach it."""
    closed = sorted(denied)
    for at, each in enumerate(network.destinations):
        if prefix_of(each.to) in own and all(_lies_in(ports, closed) for ports in each.ranges()):
            ports = ", ".join(map(str, each.ports))
            raise InvalidArgument(
                f"network.destinations.{at}: port {ports} of {each.to} is of this machine's control plane, "
                "which no policy opens",
                hint="serve on another port: docs/egress.md has those that are denied",
            )


def _lies_in(ports: tuple[int, int], closed: Iterable[tuple[int, int]]) -> bool:
    """Whether these ranges, in order, have all of the ports among them."""
    first, last = ports
    for low, high in closed:
        if low <= first <= high:
            first = high + 1
    return first > last


def reaches(rule: Rule, place: Prefix, own: Own = NONE_OWN) -> bool:
    """Whether a rule speaks of this address or prefix: it covers it, and neither a private range nor an own
    address stands between."""
    return rule.prefix.covers(place) and rule.prefix.length >= _least_length(place, own)


def compile_table(rules: Iterable[Rule], own: Own = NONE_OWN, *, with_zones: bool = True) -> Table:
    """Entries such that the longest prefix of any address has exactly the ports of the rules that reach it.
    InvalidArgument when more than MAX_RANGES different ranges meet in one place."""
    by_prefix: dict[Prefix, list[Ports]] = {}
    for rule in rules:
        by_prefix.setdefault(rule.prefix, []).append(rule.ports)
    lengths = sorted({prefix.length for prefix in by_prefix})
    places = set(by_prefix)
    if with_zones:
        zones = chain(_ZONES, own)
        places.update(zone for zone in zones if any(_covering(by_prefix, lengths, zone, 0)))
    return {
        place: _merged(
            chain.from_iterable(
                _covering(by_prefix, lengths, place, _least_length(place, own) if with_zones else 0)
            ),
            place,
        )
        for place in places
    }


def entry_at(rules: Iterable[Rule], place: Prefix, own: Own = NONE_OWN) -> tuple[Ports, ...]:
    """What `compile_table` has for one place. InvalidArgument as there."""
    return _merged((rule.ports for rule in rules if reaches(rule, place, own)), place)


def _least_length(place: Prefix, own: Own) -> int:
    """Of a prefix that speaks of this place: that of the narrowest private range which it lies in, or all of
    an own address."""
    if place in own:
        return place.length
    return max((zone.length for zone in _ZONES if zone.covers(place)), default=0)


def _covering(
    by_prefix: Mapping[Prefix, list[Ports]], lengths: list[int], place: Prefix, least: int
) -> Iterator[list[Ports]]:
    """Ports of the prefixes of these lengths that cover a place: a look-up a length, however many rules."""
    for length in lengths:
        if least <= length <= place.length:
            shift = 128 - length
            if (found := by_prefix.get(Prefix(place.value >> shift << shift, length))) is not None:
                yield found


def _merged(ports: Iterable[Ports], place: Prefix) -> tuple[Ports, ...]:
    longest: dict[tuple[int, int, int], int] = {}
    for each in ports:
        key = (each.first, each.last, each.protocol)
        known = longest.get(key, -1)
        forever = FOREVER in (known, each.until_ns)
        longest[key] = FOREVER if forever else max(known, each.until_ns)
    if len(longest) > MAX_RANGES:
        raise InvalidArgument(
            f"network: {len(longest)} ranges of ports meet at {address_text(place.packed())}",
            hint=f"at most {MAX_RANGES} fit; join neighbouring ports into ranges",
        )
    return tuple(Ports(*key, until_ns) for key, until_ns in sorted(longest.items()))


class Denials:
    """Rules that nothing overrides, by place: a machine may have thousands of addresses."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._by_prefix: dict[Prefix, list[Ports]] = {}
        for rule in rules:
            self._by_prefix.setdefault(rule.prefix, []).append(rule.ports)
        self._lengths = sorted({prefix.length for prefix in self._by_prefix})
        self._in_order = sorted(self._by_prefix)

    def near(self, place: Prefix) -> Iterator[Ports]:
        """What is denied of the place, or of a part of it."""
        yield from chain.from_iterable(_covering(self._by_prefix, self._lengths, place, 0))
        behind = place.value + (1 << 128 - place.length)
        first, end = (bisect_left(self._in_order, Prefix(value, 0)) for value in (place.value, behind))
        for prefix in self._in_order[first:end]:
            if prefix.length > place.length:
                yield from self._by_prefix[prefix]


def is_clear(place: Prefix, ports: Iterable[Ports], denied: Denials) -> bool:
    """True when nothing of these ports at this place is denied, which saves the programs a look-up."""
    near = tuple(denied.near(place))
    return not any(_overlap(each, other) for each in ports for other in near)


def _overlap(a: Ports, b: Ports) -> bool:
    same = 0 in (a.protocol, b.protocol) or a.protocol == b.protocol
    return same and a.first <= b.last and b.first <= a.last


def pack_entry(ports: tuple[Ports, ...], *, clear: bool = False) -> bytes:
    """struct entry of egress.bpf.c."""
    ranges = b"".join(_RANGE.pack(each.until_ns, each.first, each.last, each.protocol) for each in ports)
    return _ENTRY.pack(len(ports), clear) + ranges.ljust(MAX_RANGES * _RANGE.size, b"\0")


def pack_allow_key(sandbox: int, generation: int, prefix: Prefix) -> bytes:
    """struct allow_key: bits of the prefix, the sandbox's cgroup id, its generation, the address."""
    return struct.pack("=IQI", 96 + prefix.length, sandbox, generation) + prefix.packed()


def pack_deny_key(prefix: Prefix) -> bytes:
    """struct deny_key."""
    return struct.pack("=I", prefix.length) + prefix.packed()
