"""Policies by name, for common purposes. Each is a start: `policy.model_copy(update=...)` changes a field."""

from collections.abc import Callable
from ipaddress import ip_address
from typing import Literal, get_args

from sandbox.errors import InvalidArgument
from sandbox.policy.document import Policy
from sandbox.policy.network import (
    ANY_NAME,
    WAY_TO_OWN_SERVER,
    Destination,
    Names,
    Network,
    Protocol,
    dead_end,
    known_services,
)

PresetName = Literal["offline", "package-index-only", "agent", "grader", "open"]


def offline() -> Policy:
    """No network at all."""
    return Policy(network="none")


def package_index_only() -> Policy:
    """Every service of services.toml by its name, and nothing else."""
    return Policy(network=Network(services=tuple(sorted(known_services()))))


def agent(gateway: str) -> Policy:
    """The gateway and nothing else. `gateway` is ADDRESS:PORT, as the sandbox reaches it ([ADDRESS]:PORT for
    version 6); it may be private, and be this machine's, but no loopback: a sandbox's is its own."""
    address, _, port = gateway.rpartition(":")
    try:
        to = ip_address(address.removeprefix("[").removesuffix("]"))
        if (why := dead_end(str(to))) is not None:
            raise InvalidArgument(f"gateway={gateway!r}: {why}", hint=WAY_TO_OWN_SERVER)
    except ValueError as error:
        raise _no_gateway(gateway) from error
    try:
        return Policy(network=Network(destinations=(Destination(to=str(to), ports=(port,)),)))
    except InvalidArgument as error:
        raise _no_gateway(gateway) from error


def _no_gateway(gateway: str) -> InvalidArgument:
    hint = "write ADDRESS:PORT, such as 10.0.0.5:8000"
    return InvalidArgument(f"gateway={gateway!r} is no address with a port", hint=hint)


def grader() -> Policy:
    """For hidden tests: no network, more time and output than a command of an agent has, and a layer on disk
    where the host has one, so that what tests write takes nothing from their memory."""
    return Policy(network="none", timeout_s=600.0, output_total_bytes=256 << 20, layer="disk-first")


def open_internet() -> Policy:
    """Every public address and name that is not this machine's. Private ranges, its own addresses, metadata
    and the control plane stay shut."""
    protocols: tuple[Protocol, ...] = get_args(Protocol)
    everywhere = tuple(
        Destination(to=net, ports=("1-65535",), protocol=protocol)
        for net in ("0.0.0.0/0", "::/0")
        for protocol in protocols
    )
    names = tuple(Names(domains=(ANY_NAME,), ports=("1-65535",), protocol=each) for each in protocols)
    return Policy(network=Network(destinations=everywhere, names=names))


_PRESETS: dict[PresetName, Callable[[], Policy]] = {
    "offline": offline,
    "package-index-only": package_index_only,
    "grader": grader,
    "open": open_internet,
}


def preset(name: str, *, gateway: str | None = None) -> Policy:
    """The preset of that name. InvalidArgument for an unknown one, and for `agent` without a gateway."""
    if name == "agent":
        if gateway is None:
            raise InvalidArgument("preset 'agent' needs gateway", hint="such as gateway='10.0.0.5:8000'")
        return agent(gateway)
    if gateway is not None:
        raise InvalidArgument(f"gateway={gateway!r} is for preset 'agent'", hint="leave it out")
    for known, make in _PRESETS.items():
        if known == name:
            return make()
    raise InvalidArgument(f"preset={name!r} is unknown", hint=f"use {', '.join(get_args(PresetName))}")
