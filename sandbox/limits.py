"""Limits of a sandbox: what was asked, what the host can enforce, what therefore holds. Pure."""

import math
from dataclasses import dataclass
from typing import Literal

from sandbox.arguments import check_type
from sandbox.errors import InvalidArgument, UnsupportedError
from sandbox.layers import LayerKind, LayerWish

MIB = 1 << 20
MAX_LIFETIME_S = 30 * 86_400.0
_LIFETIME_S = (0.001, MAX_LIFETIME_S)  # least and most, of an idle time too
LimitName = Literal["cpu", "memory", "pids", "disk"]

# An inode of the writable layer costs about a kilobyte of kernel memory; source trees average 8 KiB a file.
LAYER_BYTES_AN_INODE = 8192


@dataclass(frozen=True, slots=True)
class Asked:
    """The caller's words; None where the caller left it to us."""

    cpu: float | None = None
    memory_mb: int | None = None
    pids: int | None = None
    disk_mb: int | None = None
    lifetime_s: float = 3600.0
    idle_s: float | None = None
    layer: LayerWish = "auto"


@dataclass(frozen=True, slots=True)
class Limits:
    """Effective values. None = not limited on this host. `degraded` says in words what that leaves open."""

    cpus: float | None
    memory_bytes: int | None  # all processes, and the writable layer where that lies in memory
    pids: int | None
    process_bytes: int | None  # data of one process, where `memory_bytes` cannot be enforced
    disk_bytes: int
    disk_inodes: int
    lifetime_s: float
    idle_s: float | None
    degraded: tuple[str, ...] = ()
    layer: LayerKind = "memory"  # where what is written lies
    layer_is_default: bool = False  # in memory, which nobody has asked for


@dataclass(frozen=True, slots=True)
class _Rule:
    field: str
    default: float
    least: float
    most: float


_RULES: dict[LimitName, _Rule] = {
    "cpu": _Rule("cpu", 1.0, 0.01, 4096),
    "memory": _Rule("memory_mb", 512, 16, 1 << 24),
    "pids": _Rule("pids", 128, 8, 1 << 22),
    "disk": _Rule("disk_mb", 256, 1, 1 << 24),
}

LAYER_IN_MEMORY = (
    "a layer on disk: what is written counts as memory, which bounds both (layer='disk' asks for one)"
)
_CONSEQUENCE: dict[LimitName, str] = {
    "cpu": "a sandbox may use every core",
    "memory": "only each process by itself is, and a sandbox may use all memory of the host",
    "pids": "a sandbox may start any number of processes",
    "disk": "a sandbox may fill the disk",
}


def settle(
    asked: Asked,
    enforceable: frozenset[LimitName],
    gaps: tuple[str, ...] = (),
    layer: LayerKind = "memory",
    *,
    most_cpus: float | None = None,
) -> Limits:
    """What holds for `asked` on a host that can enforce `enforceable`, with a writable layer of kind `layer`.

    Raises InvalidArgument for values out of range, and UnsupportedError for a limit that the caller wrote and
    the host cannot enforce. A default that it cannot enforce is left out and named in `degraded`, as `gaps`
    are: what the host leaves open of what it can enforce. All sandboxes together
    have `most_cpus` cores (see `cpu_bound`): a default is that at most, and more is InvalidArgument.
    """
    values = {
        "cpu": asked.cpu,
        "memory": asked.memory_mb,
        "pids": asked.pids,
        "disk": asked.disk_mb,
    }
    settled: dict[LimitName, float | None] = {}
    degraded: list[str] = []
    for name, rule in _RULES.items():
        value = values[name]
        if value is not None:
            _check_range(rule.field, value, rule.least, rule.most)
        if name in enforceable:
            settled[name] = rule.default if value is None else value
            if name == "cpu" and most_cpus is not None:
                settled[name] = _bounded_cpus(value, rule.default, most_cpus)
            continue
        if value is not None:
            raise UnsupportedError(
                f"{rule.field}={value} cannot be enforced on this host",
                capability=name if name == "disk" else f"cgroup {name}",
                hint=f"leave {rule.field} out to run without it, or see `dockyard doctor`",
            )
        settled[name] = None
        degraded.append(f"{name} is not limited here: {_CONSEQUENCE[name]}")
    _check_range("lifetime_s", asked.lifetime_s, *_LIFETIME_S)
    check_lifetime(None, asked.idle_s)
    return _limits(settled, asked, layer, (*degraded, *gaps))


def _bounded_cpus(asked: float | None, default: float, most: float) -> float:
    if asked is None:
        return min(default, most)
    if asked > most:
        raise InvalidArgument(
            f"cpu={asked} is more than the {most:g} cores that all sandboxes here have together",
            hint=f"use {most:g} at most, or have the bound raised: `dockyard node helper --cpu`, or that of "
            "the container or service that this runs in",
        )
    return asked


def check_lifetime(lifetime_s: float | None, idle_s: float | None) -> None:
    """Raises InvalidArgument for one that is there and out of range."""
    for field, value in (("lifetime_s", lifetime_s), ("idle_s", idle_s)):
        if value is not None:
            _check_range(field, value, *_LIFETIME_S)


def _limits(
    settled: dict[LimitName, float | None], asked: Asked, layer: LayerKind, degraded: tuple[str, ...]
) -> Limits:
    memory, pids = settled["memory"], settled["pids"]
    disk_bytes = int((settled["disk"] or _RULES["disk"].default) * MIB)
    return Limits(
        cpus=settled["cpu"],
        memory_bytes=None if memory is None else int(memory * MIB),
        pids=None if pids is None else int(pids),
        process_bytes=int(_RULES["memory"].default * MIB) if memory is None else None,
        disk_bytes=disk_bytes,
        disk_inodes=max(1024, disk_bytes // LAYER_BYTES_AN_INODE),
        lifetime_s=asked.lifetime_s,
        idle_s=asked.idle_s,
        degraded=degraded,
        layer=layer,
        layer_is_default=layer == "memory" and asked.layer != "memory",
    )


def _check_range(field: str, value: float, least: float, most: float) -> None:
    check_type(field, value, int, float)
    if not math.isfinite(value) or not least <= value <= most:
        raise InvalidArgument(
            f"{field}={value} is out of range", hint=f"use {_plain(least)} to {_plain(most)}"
        )


def _plain(bound: float) -> str:
    """Without an exponent: 16,777,216 and 0.1."""
    return f"{int(bound):,}" if bound == int(bound) else f"{bound:g}"
