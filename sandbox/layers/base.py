"""The seam between "a writable layer of so many bytes and inodes" and what this host can give.

A mechanism makes a layer for one sandbox; launch mounts it in the sandbox's own mount namespace, with the
overlay on it. To add a mechanism: write one module with these methods and name it in `layers.MECHANISMS`.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

LayerKind = Literal["memory", "image", "quota"]
"""memory: a tmpfs, which counts as the sandbox's memory. image: a file system in a file. quota: a directory
under a project quota."""
LayerWish = Literal["auto", "disk", "disk-first", "memory", "image", "quota"]
"""auto: what the policy says, else what is fastest, memory. disk: quota where the host has it, else image.
disk-first: disk where the host has it, else memory."""


@dataclass(frozen=True, slots=True)
class LayerSize:
    """What a layer takes at least, before it says that it is full."""

    bytes: int
    inodes: int


@dataclass(slots=True)
class Layer:
    """One sandbox's. `mount` is a descriptor of a mount that lies nowhere, for launch to put in its place;
    None: launch makes a tmpfs. `directory` is what it has on the host."""

    mount: int | None = None
    directory: Path | None = None

    def let_go(self) -> None:
        """Closes the descriptor: from now on the sandbox's mount namespace holds the mount. Idempotent."""
        if self.mount is not None:
            os.close(self.mount)
        self.mount = None


class Mechanism(Protocol):
    """Stateless but for what it has found out and keeps in stock. Thread-safe."""

    def missing(self, state_dir: Path) -> str:
        """Why this host cannot make such layers for sandboxes of this state directory, found by making one;
        empty when it can. Milliseconds, the second time nothing. OSError, CapacityError where there is no
        room to find out: only what the host lacks is remembered."""
        ...

    def make(self, state_dir: Path, sandbox_id: str, size: LayerSize) -> Layer:
        """A fresh, empty layer; milliseconds. CapacityError where the host is out of something, OSError."""
        ...

    def remove(self, layer: Layer) -> None:
        """Lets go of what `let_go` has not, and removes what is on the host. Idempotent."""
        ...
