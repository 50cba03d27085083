"""Which mechanism makes a sandbox's writable layer: what the caller asks for, and what this host has."""

from pathlib import Path
from typing import get_args

from sandbox.errors import InvalidArgument, UnsupportedError, telling_shortage
from sandbox.layers.base import LayerKind, LayerWish, Mechanism
from sandbox.layers.image import ImageLayers
from sandbox.layers.memory import MemoryLayers
from sandbox.layers.quota import QuotaLayers

_images = ImageLayers()
MECHANISMS: dict[LayerKind, Mechanism] = {
    "quota": QuotaLayers(),
    "image": _images,
    "memory": MemoryLayers(),
}
_ON_DISK: tuple[LayerKind, ...] = ("quota", "image")  # in order of preference


def choose(wish: LayerWish, state_dir: Path) -> LayerKind:
    """The kind that is made. `auto` is memory: it costs a create nothing and needs nothing of the host (see
    docs/decisions).

    Raises InvalidArgument for an unknown wish, UnsupportedError, with what this host lacks, for one that it
    cannot fulfil, and CapacityError where it has no room to find out.
    """
    if wish in ("auto", "memory"):
        return "memory"
    if wish not in get_args(LayerWish):
        known = ", ".join(repr(each) for each in get_args(LayerWish))
        raise InvalidArgument(f"layer={wish!r} is unknown", hint=f"use one of {known}")
    reasons: list[str] = []
    for kind in _ON_DISK if wish in ("disk", "disk-first") else (wish,):
        with telling_shortage("trying a layer on disk"):
            reason = MECHANISMS[kind].missing(state_dir)
        if not reason:
            return kind
        reasons.append(reason)
    if wish == "disk-first":
        return "memory"
    raise UnsupportedError(
        f"layer={wish!r} cannot be made on this host: {'; '.join(reasons)}",
        capability="layer on disk",
        hint="leave layer out for one in memory, or see `dockyard doctor`",
    )


def drain() -> None:
    """Removes the layers that this process has made ahead. They end with the process too."""
    _images.drain()
