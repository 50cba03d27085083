"""Whether the uplink passes on what sandboxes send beyond it, which is the machine's to say."""

from collections.abc import Iterable

from sandbox.egress.rules import Own, prefix_of
from sandbox.egress.settings import read_settings
from sandbox.policy import Network

SETTINGS = {4: "ipv4/ip_forward", 6: "ipv6/conf/all/forwarding"}  # by version of IP, below /proc/sys/net


def switched_off() -> tuple[int, ...]:
    """Versions of IP that the calling thread's namespace does not forward."""
    values = read_settings(SETTINGS.values())
    return tuple(version for version, name in SETTINGS.items() if values[name] != "1")


def setting_name(version: int) -> str:
    """As sysctl(8) has it."""
    return f"net.{SETTINGS[version].replace('/', '.')}"


def versions_beyond(networks: Iterable[Network], own: Own) -> frozenset[int]:
    """Those by which these lead to others than the uplink itself. Names do by version 4, whatever else."""
    found = set[int]()
    for network in networks:
        beyond = (each for each in network.destinations if prefix_of(each.to) not in own)
        found |= {6 if ":" in each.to else 4 for each in beyond}
        found |= {4} if network.all_names() else set()
    return frozenset(found)


def lacking_ways(networks: Iterable[Network], own: Own, off: Iterable[int]) -> tuple[str, ...]:
    """What sandboxes with these lack where that is switched off."""
    needed = versions_beyond(networks, own)
    return tuple(
        f"a way beyond this machine by version {version} of IP: {setting_name(version)} is off"
        for version in off
        if version in needed
    )
