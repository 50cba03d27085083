"""Where a sandbox may connect to: the network part of a policy. What is not said is refused."""

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from ipaddress import IPv4Network, IPv6Network, collapse_addresses, ip_network
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

from sandbox.policy.base import Document
from sandbox.privileged.denials import NOWHERE, POOL_4, POOL_6

Protocol = Literal["tcp", "udp"]
MAX_RULES = 256  # of a kind, in one document
ANY_NAME = "*"
_SERVICES_FILE = Path(__file__).with_name("services.toml")
# Neighbours as one net: all of 224.0.0.0/3 is denied, by two entries.
_NOWHERE = (
    *collapse_addresses((*(IPv4Network(each) for each in NOWHERE if ":" not in each), POOL_4)),
    *collapse_addresses((*(IPv6Network(each) for each in NOWHERE if ":" in each), POOL_6)),
)
_MAPPED, _NAT64 = IPv6Network("::ffff:0:0/96"), IPv6Network("64:ff9b::/96")
WAY_TO_OWN_SERVER = "for a server of this machine: `dockyard serve --host ADDRESS`, with one of its addresses"
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")


def _checked_port(value: int | str) -> int | str:
    low, high = port_range(value)
    if not 1 <= low <= high <= 65535:
        raise ValueError(f"{value!r} is no port and no range of ports; write 443 or '8000-8010'")
    return value


def port_range(value: int | str) -> tuple[int, int]:
    """First and last of 443, "443" or "8000-8010". ValueError for text that is neither."""
    first, _, last = str(value).partition("-")
    if not first.isdecimal() or not (last or first).isdecimal():
        raise ValueError(f"{value!r} is no port and no range of ports; write 443 or '8000-8010'")
    return int(first), int(last or first)


def _checked_domain(value: str) -> str:
    """Lower case, without the final dot."""
    name = value.lower().removesuffix(".")
    labels = name.removeprefix("*.").split(".")
    if name == ANY_NAME:
        return name
    if len(labels) < 2 or len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError(
            f"{value!r} is no domain; write 'example.org', or '*.example.org' for all below it, "
            "in ASCII (xn--...)"
        )
    if labels[-1].isdecimal():
        raise ValueError(f"{value!r} is an address; write it under `destinations`")
    return name


def _checked_net(value: str) -> str:
    if (why := dead_end(value)) is not None:
        raise ValueError(f"{why}; {WAY_TO_OWN_SERVER}")
    return str(ip_network(value))


def dead_end(to: str) -> str | None:
    """Why no policy leads to any address of this network, None where one may. ValueError for no network."""
    if "%" in to:
        raise ValueError(
            f"{to!r} names a link of this machine, which a sandbox does not have; leave out the %..."
        )
    net = _plain(ip_network(to))
    if not any(net.version == each.version and net.subnet_of(each) for each in _NOWHERE):  # pyright: ignore[reportArgumentType]
        return None
    if net.is_loopback or net.network_address.is_unspecified:
        return "a sandbox's loopback is its own, and leads to nobody else"
    return (
        "no policy leads there: link-local and metadata addresses, multicast, other sandboxes and reserved "
        "ranges are denied to all"
    )


def _plain(net: IPv4Network | IPv6Network) -> IPv4Network | IPv6Network:
    """Of a mapped or NAT64 form the version 4 network that it is."""
    if isinstance(net, IPv6Network) and any(net.subnet_of(each) for each in (_MAPPED, _NAT64)):
        return IPv4Network((int(net.network_address) & 0xFFFFFFFF, net.prefixlen - 96))
    return net


Net = Annotated[str, AfterValidator(_checked_net)]
Port = Annotated[int | str, AfterValidator(_checked_port)]
Domain = Annotated[str, AfterValidator(_checked_domain)]


class _Rule(Document):
    # 443 or "8000-8010"; at least one.
    ports: tuple[Port, ...] = Field(min_length=1, max_length=8)
    protocol: Protocol = "tcp"

    def ranges(self) -> Iterator[tuple[int, int]]:
        """First and last port of each."""
        return (port_range(each) for each in self.ports)


class Destination(_Rule):
    """Addresses. One that lies in a private range must be written as such, and one of this machine's own by
    itself: wider rules leave those out. InvalidArgument where no policy leads."""

    # "203.0.113.7", "198.51.100.0/24", "2001:db8::/32"; kept with its length: "203.0.113.7/32"
    to: Net


class Names(_Rule):
    """What these names resolve to, for as long as the answer holds; private addresses never."""

    # "example.org" is that name alone, "*.example.org" all below it, "*" every name.
    domains: tuple[Domain, ...] = Field(min_length=1, max_length=MAX_RULES)


class Network(Document):
    """Allowed destinations. Nothing in it: nothing is allowed, and names do not resolve."""

    destinations: tuple[Destination, ...] = Field(default=(), max_length=MAX_RULES)
    names: tuple[Names, ...] = Field(default=(), max_length=MAX_RULES)
    # of services.toml: "pypi", "npm", "debian" and others
    services: tuple[str, ...] = Field(default=(), max_length=MAX_RULES)

    @field_validator("services")
    @classmethod
    def _services_are_known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if name not in known_services():
                raise ValueError(f"{name!r} is unknown; use {', '.join(sorted(known_services()))}")
        return value

    def all_names(self) -> tuple[Names, ...]:
        """Those written and those of the services."""
        return (*self.names, *(known_services()[each] for each in self.services))


@cache
def known_services() -> dict[str, Names]:
    """The services of services.toml, by name."""
    tables = tomllib.loads(_SERVICES_FILE.read_text())
    return {
        name: Names(domains=tuple(table["domains"]), ports=tuple(table["ports"]))
        for name, table in tables.items()
    }
