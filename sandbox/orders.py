"""What a caller orders: everything that makes one sandbox another than the next. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Literal

from sandbox.arguments import check_type
from sandbox.egress.helped import Uplink
from sandbox.errors import InvalidArgument
from sandbox.limits import Asked
from sandbox.policy import Network, Policy
from sandbox.substrates.base import HOSTNAME
from sandbox.texts import system_bytes


@dataclass(frozen=True, slots=True)
class Order:
    """Arguments of `Sandbox.create` after defaults; equal orders make equal sandboxes."""

    image: str
    substrate: str
    policy: Policy
    limits: Asked
    labels: tuple[tuple[str, str], ...]
    state_dir: Path
    toolkit: Path
    runtime: str | None = None
    egress: Uplink | None = None
    snapshot: str | None = None
    hostname: str = HOSTNAME
    env: tuple[tuple[str, str], ...] = field(default=(), repr=False)  # may be secret


def checked_labels(labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """In the order of their names. InvalidArgument for what is not text."""
    check_type("labels", labels, Mapping)
    for name, value in labels.items():
        if not isinstance(name, str) or not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"labels: {name!r}={value!r} is not text")
    return tuple(sorted(labels.items()))


def checked_env(env: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """In the order of their names. InvalidArgument for what no environment can hold, without its value."""
    check_type("env", env, Mapping)
    for name, value in env.items():
        system_bytes("env: a name", name)
        before, has_sign, _ = name.partition("=")
        if not before or has_sign:
            raise InvalidArgument(f"env: {before!r} is no name, or has more to it", hint="use {NAME: VALUE}")
        system_bytes(f"env: the value of {name!r}", value)
    return tuple(sorted(env.items()))


def checked_policy(policy: Policy | None) -> Policy:
    """The caller's, or the default one. InvalidArgument for what is none."""
    check_type("policy", policy, Policy, NoneType)
    return policy or Policy()


def checked_network(network: Network | Literal["none"]) -> Network:
    """What allows nothing, for "none". InvalidArgument for what is neither."""
    if network == "none":
        return Network()
    check_type("network", network, Network)
    return network


def checked_order(order: Order) -> Order:
    """InvalidArgument for what is not of its type; values are looked at where they count."""
    for name in ("image", "substrate"):
        check_type(name, getattr(order, name), str)
    for name in ("runtime", "snapshot"):
        check_type(name, getattr(order, name), str, NoneType)
    return order


def difference(first: Order, second: Order) -> str:
    """The first argument in which they differ, with both values where those are short; empty for equals."""
    for (name, before), (_, after) in zip(_arguments(first), _arguments(second), strict=True):
        if before != after:
            plain = isinstance(before, _PLAIN) and isinstance(after, _PLAIN)
            return f"{name}={after!r}, which was {before!r}" if plain else f"another {name}"
    return ""


_PLAIN = (str, int, float, Path, type(None))


def _arguments(order: Order) -> Iterator[tuple[str, object]]:
    for each in fields(order):
        if each.name != "limits":
            yield each.name, getattr(order, each.name)
    for each in fields(order.limits):
        yield each.name, getattr(order.limits, each.name)
