"""Network, first part: with `network="none"` a sandbox has a loopback and nothing else.

No packet of theirs leaves the machine: controls talk to the host's own addresses,
or to addresses of others that
lie on a loopback of the guard's own.
"""

import os
import socket
from collections.abc import Generator
from contextlib import contextmanager

from bench.attack_cases import peers
from bench.attack_cases.arena import Arena
from bench.attack_cases.model import Box, Case, Instead, Outside, Probe, Seen, Shown
from bench.attack_cases.programs import command
from sandbox import Sandbox

_NO_ROUTE, _REFUSED = frozenset({"ENETUNREACH"}), frozenset({"ECONNREFUSED"})
_NETWORK = "network namespace with a loopback and nothing else"
_V4 = peers.own_address(socket.AF_INET) or "127.0.0.1"
_V6 = peers.own_address(socket.AF_INET6) or "::1"
_ON_HOST = _NO_ROUTE if _V4 != "127.0.0.1" else _REFUSED
_ON_HOST_6 = _NO_ROUTE if _V6 != "::1" else _REFUSED
_PROXIES = ("HTTP_PROXY", "https_proxy", "SSH_AUTH_SOCK", "DOCKYARD_CANARY")


def _network(function: str, *arguments: str) -> Probe:
    return Probe("network", function, arguments)


def _elsewhere(number: int, name: str, title: str, host: str, port: str) -> Case:
    control = Outside("namespace", (host, port, "serve"))
    return Case(number, name, title, _network("reach", host, port), _NO_ROUTE, _NETWORK, control)


def _on_host(number: int, name: str, title: str, host: str, *spellings: str, shut: frozenset[str]) -> Case:
    """A server of ours at `host`, by all of the spellings (of the loopback, where there are none)."""

    def probe(port: str) -> Probe:
        return _network("reach_any", port, *spellings)

    peer = peers.tcp(host)
    return Case(number, name, title, peers.sought_inside(peer, probe), shut, _NETWORK,
                peers.sought_outside(peer, probe))  # fmt: skip


def _datagram(number: int, name: str, title: str, host: str, shut: frozenset[str]) -> Case:
    def probe(port: str) -> Probe:
        return _network("ask", host, port)

    peer = peers.echoing(host)
    return Case(number, name, title, peers.sought_inside(peer, probe), shut, _NETWORK,
                peers.sought_outside(peer, probe))  # fmt: skip


@contextmanager
def _server_in_sandbox(arena: Arena) -> Generator[tuple[str, Sandbox]]:
    """A server of a sandbox on all of its addresses; its port and its sandbox."""
    with arena.sandbox(Box(alone=True)) as box:
        server = box.commands.start(command(_network("serve", "/workspace/port")))
        try:
            box.commands.run("until [ -s port ]; do sleep 0.01; done")
            yield box.files.read("/workspace/port").decode(), box
        finally:
            server.kill()


def _from_neighbour(arena: Arena) -> Seen:
    with _server_in_sandbox(arena) as (port, _):
        return arena.try_in(arena.neighbour, _network("reach_any", port, "127.0.0.1", "::1"))


def _from_host(arena: Arena) -> Seen:
    with _server_in_sandbox(arena) as (port, _):
        return arena.outside(_network("reach_any", port, "127.0.0.1", "::1"), "user")


def _from_itself(arena: Arena) -> Seen:
    with _server_in_sandbox(arena) as (port, box):
        return arena.try_in(box, _network("reach_any", port, "127.0.0.1"))


def _with_proxies(arena: Arena, *, outside: bool) -> Seen:
    """Variables of the owner's that name ways out and secrets."""
    probe = Probe("paths", "read_environment", _PROXIES)
    before = dict(os.environ)
    os.environ.update(dict.fromkeys(_PROXIES, "http://127.0.0.1:9"))
    try:
        if outside:
            return arena.outside(probe, "user")
        with arena.sandbox(Box(alone=True)) as box:
            return arena.try_in(box, probe)
    finally:
        for name in _PROXIES:
            os.environ.pop(name)
        os.environ.update(before)


_FROM_ITSELF = Shown(_from_itself, "from the same sandbox")

CASES: tuple[Case, ...] = (
    _elsewhere(71, "address-v4", "an IPv4 address", "198.51.100.7", "443"),
    _on_host(71, "host-v4", "the host by its IPv4 address", _V4, _V4, shut=frozenset(_ON_HOST)),
    _elsewhere(72, "address-v6", "an IPv6 address", "2001:db8::7", "443"),
    _elsewhere(72, "address-nat64", "an IPv4 address by NAT64", "64:ff9b::c633:6407", "443"),
    _elsewhere(72, "address-6to4", "an IPv4 address by 6to4", "2002:c633:6407::7", "443"),
    _elsewhere(72, "address-teredo", "an IPv4 address by Teredo", "2001:0:c633:6407::7", "443"),
    _on_host(72, "host-v6", "the host by its IPv6 address", _V6, _V6, shut=frozenset(_ON_HOST_6)),
    _on_host(72, "host-mapped", "the host by its IPv4 address as IPv6", _V4, f"::ffff:{_V4}",
             shut=frozenset(_ON_HOST)),
    _datagram(74, "udp", "the host by UDP", _V4, _ON_HOST),
    _datagram(74, "udp-loopback", "the host's loopback by UDP", "127.0.0.1", _REFUSED),
    Case(75, "raw-socket", "raw ICMP", _network("raw_socket", "2", "3", "1"), frozenset({"EPERM"}),
         "no capability",
         Outside("namespace")),
    Case(75, "raw-socket-v6", "raw ICMP of IPv6", _network("raw_socket", "10", "3", "58"),
         frozenset({"EPERM"}),
         "no capability", Outside("namespace")),
    Case(75, "ping-socket", "echo requests by a socket for them", _network("ping_socket"),
         frozenset({"EACCES"}),
         "the network's ping_group_range is empty", Outside("namespace", ("allow",))),
    Case(79, "other-cgroup", "another cgroup, with other limits and another network policy",
         _network("change_cgroup"), frozenset({"no cgroup is in sight"}), "no cgroups mounted in the sandbox",
         Outside("root")),
    _elsewhere(81, "metadata-v4", "the cloud's metadata", "169.254.169.254", "80"),
    _elsewhere(81, "metadata-v6", "the cloud's metadata by IPv6", "fd00:ec2::254", "80"),
    _on_host(82, "host-loopback", "a server on the host's loopback, in eleven spellings", "127.0.0.1",
             shut=frozenset({"ECONNREFUSED", "ECONNREFUSED ENETUNREACH"})),
    _on_host(82, "host-loopback-v6", "a server on the host's IPv6 loopback", "::1", "::1", "ip6-localhost",
             shut=frozenset({"ECONNREFUSED", "ECONNREFUSED gaierror"})),
    _elsewhere(83, "dns-tcp", "a name server by TCP", "203.0.113.53", "53"),
    _elsewhere(83, "dns-over-tls", "a name server by TLS", "203.0.113.53", "853"),
    Case(83, "names", "a name", _network("resolve", "example.org"), frozenset({"does not resolve"}),
         "no name server is set, none could be reached",
         Instead(("localhost",), "a name of the sandbox's own")),
    Case(86, "environment", "proxies and secrets in the owner's environment",
         lambda arena: _with_proxies(arena, outside=False), frozenset({"none of them is set"}),
         "a command's environment is made of the image's and the call's alone",
         Shown(lambda arena: _with_proxies(arena, outside=True), "a child of the owner's, outside")),
    Case(89, "server-from-neighbour", "a server in a sandbox, from its neighbour", _from_neighbour, _REFUSED,
         _NETWORK,
         _FROM_ITSELF),
    Case(89, "server-from-host", "a server in a sandbox, from the host", _from_host, _REFUSED, _NETWORK,
         _FROM_ITSELF),
    Case(90, "promiscuous", "an interface that listens to everything", _network("promiscuous", "lo"),
         frozenset({"EPERM"}), "no capability", Outside("namespace")),
)  # fmt: skip
