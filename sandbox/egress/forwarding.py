"""Whether the uplink passes on what sandboxes send beyond it, which is the machine's to say.

Version 4 is passed on or not by the device that it comes in by: of a sandbox's that is what new devices get
(`conf/default`). `ip_forward` sets that of all devices when it is changed, and is not looked at again.
Version 6 has one setting. What answers come in by, nothing here looks at.
"""

from collections.abc import Iterable, Mapping
from ipaddress import IPv4Network, IPv6Network, ip_network

from sandbox.egress.rules import Own, prefix_of
from sandbox.egress.settings import read_settings
from sandbox.policy import Network

# By version of IP, below /proc/sys/net: what decides, behind what turns it on for all where that is off.
SETTINGS = {
    4: ("ipv4/ip_forward", "ipv4/conf/default/forwarding"),
    6: ("ipv6/conf/all/forwarding",),
}
_OFF = ("0", "")  # "2" is on
_MAPPED = IPv6Network("::ffff:0:0/96")


def switched_off() -> dict[int, str]:
    """Versions of IP that the calling thread's namespace does not forward, and what is off, as sysctl(8) has
    it. OSError."""
    values = read_settings(name for names in SETTINGS.values() for name in names)
    return {
        version: f"net.{next(name for name in names if values[name] in _OFF).replace('/', '.')}"
        for version, names in SETTINGS.items()
        if values[names[-1]] in _OFF
    }


def versions_beyond(networks: Iterable[Network], own: Own) -> frozenset[int]:
    """Those by which these lead to others than the uplink itself. Names do by version 4, whatever else."""
    found = set[int]()
    for network in networks:
        found |= {_version(each.to) for each in network.destinations if prefix_of(each.to) not in own}
        found |= {4} if network.all_names() else set()
    return frozenset(found)


def _version(to: str) -> int:
    """By which packets go there: by 4 to a mapped address, by 6 to one for NAT64."""
    net = ip_network(to)
    return 4 if isinstance(net, IPv4Network) or net.subnet_of(_MAPPED) else 6


def lacking_ways(networks: Iterable[Network], own: Own, off: Mapping[int, str]) -> tuple[str, ...]:
    """What sandboxes with these lack where that is switched off."""
    needed = versions_beyond(networks, own)
    return tuple(
        f"a way beyond this machine by version {version} of IP: {name} is off"
        for version, name in off.items()
        if version in needed
    )
