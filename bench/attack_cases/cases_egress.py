"""Network, second part: sandboxes that may reach one server of a small world and try for the others.

The world is a network namespace with servers at addresses that are nobody's. What a policy refuses, the same
policy with one rule more lets through: so the rule is what refuses it.
"""

import errno
import os
import socket
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench.attack_cases import tracking
from bench.attack_cases.announcements import announced, announced_unfenced
from bench.attack_cases.arena import Arena
from bench.attack_cases.model import Apart, Box, Case, Control, Deed, Instead, Probe, Raised, Seen, Shown
from bench.attack_cases.programs import command
from bench.attack_cases.world import (
    HOST,
    HOST_6,
    METADATA,
    NAMESERVER,
    NAT64_OTHER,
    OTHER,
    OWN,
    PRIVATE,
    missing,
    missing_own,
)
from sandbox import Policy, Sandbox
from sandbox.egress import namespaces, service
from sandbox.egress.libbpf import BpfMap
from sandbox.policy import Network, presets

_REFUSED = frozenset({"EPERM"})
_UNKNOWN = frozenset({"does not resolve"})
_BY_RULES = "egress rules, in the kernel"
_WHATEVER = "denied on this node whatever a policy says"
_LOOK_ALIKES = ("evil-example.org", "example.org.evil.com", "secret.example.org")
_WEB = {"to": HOST, "ports": [80]}


def _box(*more: dict[str, Any], names: tuple[str, ...] = ("example.org", "rebound.example.org")) -> Box:
    """May reach the world's web server, by its address and by name, and `more`."""
    rules = {"destinations": [_WEB, *more], "names": [{"domains": names, "ports": [80]}]}
    return Box(policy=Policy(network=Network.model_validate(rules)))


FIRST_FLOW, NUM_FLOWS = 20_000, 2_000
_MANY_PORTS = _box({"to": HOST, "ports": [f"{FIRST_FLOW}-{FIRST_FLOW + NUM_FLOWS}"], "protocol": "udp"})
_ANYWHERE = Box(policy=presets.open_internet())


def _probe(function: str, *arguments: str, box: Box | None = None) -> Probe:
    return Probe("network", function, arguments, box or _box())


def _case(number: int, name: str, title: str, attack: Probe, control: Control, *,
          shut: frozenset[str] = _REFUSED, mechanism: str = _BY_RULES) -> Case:  # fmt: skip
    return Case(number, f"egress-{name}", title, attack, shut, mechanism, control, needs=missing)


def _allowed(to: str, port: int, protocol: str = "tcp") -> Raised:
    """With one rule more."""
    return Raised(_box({"to": to, "ports": [port], "protocol": protocol}))


def _from_world(host: str, port: int) -> Shown:
    """From the world itself, where nobody's rules hold."""

    def connect() -> str:
        with socket.create_connection((host, port), 5) as peer:
            return f"heard {peer.recv(16)!r}"

    def deed(arena: Arena) -> Seen:
        return Seen(True, namespaces.run_in(arena.world.namespace, connect))

    return Shown(deed, "from the world itself")


def _never_asked(arena: Arena) -> Seen:
    """A name that carries something out, though it does not exist. Open where it left the machine."""
    arena.inside(_probe("resolve", "c2VjcmV0.example.net"))
    left = "c2vjcmv0.example.net" in arena.world.asked()
    return Seen(left, "it was asked for" if left else "nobody was asked")


def _asked(arena: Arena) -> Seen:
    arena.inside(_probe("resolve", "c2VjcmV0.example.net", box=_box(names=("*.example.net",))))
    return Seen("c2vjcmv0.example.net" in arena.world.asked(), "it was asked for")


def _sandbox_to_sandbox(arena: Arena, *, from_world: bool) -> Seen:
    """A server in one sandbox, sought from another, both with all that a policy can open."""
    with arena.sandbox(Box(policy=_ANYWHERE.policy, alone=True)) as box:
        own = arena.try_in(box, _probe("own_address", HOST)).said
        server = box.commands.start(command(_probe("serve", "/workspace/port")))
        box.commands.run("until [ -s port ]; do sleep 0.01; done")
        port = box.files.read("/workspace/port").decode()
        if from_world:
            seen = Seen(True, namespaces.run_in(arena.world.namespace, lambda: _connect(own, int(port))))
        else:
            seen = arena.inside(_probe("reach", own, port, box=_ANYWHERE))
        server.kill()
    return seen


def _connect(host: str, port: int) -> str:
    """From an address to which the policy lets answers go."""
    with socket.create_connection((host, port), 5, source_address=(HOST, 0)):
        return "talked to it"


def _flows(*, tracked: bool) -> Deed:
    """Datagrams to many ports of a server that is allowed. Open where the world remembers them, as a network
    that translates addresses does for half a minute, in a table that has an end."""

    def deed(arena: Arena) -> Seen:
        world = arena.world.namespace
        with tracking.tracking(world) if tracked else nullcontext():
            before = tracking.remembered(world)
            seen = arena.inside(_probe("flows", HOST, str(FIRST_FLOW), str(NUM_FLOWS), box=_MANY_PORTS))
            found = tracking.remembered(world) - before
        if found > 0:
            return Seen(
                True, "the world remembers them" if found > NUM_FLOWS // 2 else f"it remembers {found}"
            )
        return Seen(False, f"{seen.said}, nobody remembers them")

    return deed


def _no_tracking() -> str:
    return missing_own() or tracking.missing()


def _without_programs(arena: Arena) -> Seen:
    """A host that cannot enforce the rules. Open where there is a sandbox nevertheless."""
    nowhere = patch.object(service, "EGRESS_OBJECT", Path("/nowhere"))
    substrate, policy = arena.substrate, _box().policy
    with (
        nowhere,
        Sandbox.create(substrate=substrate, policy=policy, state_dir=arena.state_dir, toolkit=arena.toolkit),
    ):
        return Seen(True, "there is a sandbox")


def _full_map(arena: Arena) -> Seen:
    """A kernel's map that takes no rule more. Open where there is a sandbox nevertheless."""
    egress = arena.world.egress
    full = patch.object(BpfMap, "set", side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    substrate, policy = arena.substrate, _box().policy
    state_dir, toolkit = arena.state_dir, arena.toolkit
    with (
        full,
        Sandbox.create(
            substrate=substrate, policy=policy, egress=egress, state_dir=state_dir, toolkit=toolkit
        ),
    ):
        return Seen(True, "there is a sandbox")


CASES: tuple[Case, ...] = (
    Case(47, "egress-flows", f"{NUM_FLOWS:,} flows for a table of connections that has an end",
         _flows(tracked=False), frozenset({f"sent {NUM_FLOWS}, nobody remembers them"}),
         "neither rules nor links track connections",
         Shown(_flows(tracked=True), "to a world that translates addresses"), "contained",
         needs=_no_tracking),
    _case(71, "port", "another port of a server that is allowed", _probe("reach", HOST, "81"),
          _allowed(HOST, 81)),
    _case(71, "address", "another server", _probe("reach", OTHER, "80"), _allowed(OTHER, 80)),
    _case(71, "fast-open", "another server, with data before the connection",
          _probe("fast_open", OTHER, "80"), _allowed(OTHER, 80)),
    _case(72, "v6", "another server, by IPv6", _probe("reach", HOST_6, "80"), _allowed(HOST_6, 80)),
    _case(72, "mapped", "another server, by its IPv4 address as IPv6",
          _probe("reach", f"::ffff:{OTHER}", "80"), _allowed(OTHER, 80)),
    _case(72, "nat64", "another server, by NAT64", _probe("reach", NAT64_OTHER, "80"), _allowed(OTHER, 80)),
    _case(74, "udp", "a server that is allowed, by UDP", _probe("ask", HOST, "5000"),
          _allowed(HOST, 5000, "udp")),
    _case(75, "packet-socket", "packets below IP", _probe("raw_socket", "17", "3", "0"),
          Apart("namespace", also=_REFUSED),
          shut=frozenset({"EAFNOSUPPORT"}),
          mechanism="seccomp; hooks on sockets and no capability; each by itself, the fence behind them"),
    _case(81, "metadata", "the cloud's metadata, under a policy that opens everything",
          _probe("reach", METADATA, "80", box=_ANYWHERE), _from_world(METADATA, 80), mechanism=_WHATEVER),
    _case(81, "metadata-mapped", "the same as IPv6",
          _probe("reach", f"::ffff:{METADATA}", "80", box=_ANYWHERE), _from_world(METADATA, 80),
          mechanism=_WHATEVER),
    _case(82, "private", "a private address, under a policy that opens everything",
          _probe("reach", PRIVATE, "80", box=_ANYWHERE), _allowed(PRIVATE, 80)),
    _case(82, "control-plane", "the control plane's ports, under a policy that names them",
          _probe("reach", OWN, "6379", box=_box({"to": OWN, "ports": ["6379-6380"]})),
          _from_world(OWN, 6379), mechanism=_WHATEVER),
    _case(82, "own-address", "an address of the machine's own, under a policy that opens everything",
          _probe("reach", OWN, "80", box=_ANYWHERE), _allowed(OWN, 80)),
    Case(82, "egress-other-sandbox", "another sandbox, under a policy that opens everything",
         lambda arena: _sandbox_to_sandbox(arena, from_world=False), _REFUSED, _WHATEVER,
         Shown(lambda arena: _sandbox_to_sandbox(arena, from_world=True), "from the world itself"),
         needs=missing),
    _case(83, "name-server", "a name server of the world", _probe("ask", NAMESERVER[0], "53"),
          _allowed(NAMESERVER[0], 53, "udp")),
    _case(83, "look-alikes", "names that look like one that is allowed",
          _probe("resolve_any", *_LOOK_ALIKES), Raised(_box(names=_LOOK_ALIKES)), shut=_UNKNOWN,
          mechanism="the only resolver, which knows the rules"),
    Case(83, "egress-tunnel", "a name that carries something out", _never_asked,
         frozenset({"nobody was asked"}), "the only resolver, which asks for allowed names alone",
         Shown(_asked, "with a rule for such names"), needs=missing),
    _case(83, "rebinding", "an allowed name with a private address", _probe("resolve", "rebound.example.org"),
          Instead(("example.org",), "an allowed name with a public address"), shut=_UNKNOWN,
          mechanism="the only resolver, which refuses private answers"),
    Case(90, "egress-announcements", "ARP, neighbour discovery and DHCP, by whoever can send frames",
         lambda arena: announced(arena, _box()), frozenset({"nothing was believed"}),
         "the fence on the link, which passes TCP and UDP from the sandbox's own addresses alone",
         Shown(announced_unfenced, "by a link without its fence"), needs=missing_own),
    Case(87, "egress-not-there", "rules that this host cannot enforce", _without_programs,
         frozenset({"UnsupportedError"}), "a sandbox is refused, not weakened",
         Shown(lambda arena: arena.inside(_probe("reach", HOST, "80")), "on a host that can"),
         needs=missing_own),
    Case(87, "egress-map-full", "rules that the kernel has no room for", _full_map,
         frozenset({"CapacityError"}), "a sandbox is refused, not weakened",
         Shown(lambda arena: arena.inside(_probe("reach", HOST, "80")), "with room for them"), needs=missing),
)  # fmt: skip
