"""What writable layers and snapshots have on the host, and which of it has lost its owner.

A layer in a file has no name and ends with its mount; of it, only a loop device can be seen. A directory
under quota has its sandbox's name. Templates and snapshots are kept on purpose; drafts are their maker's.
"""

import os
from collections.abc import Iterable, Iterator, Set
from pathlib import Path

from sandbox.layers import loops
from sandbox.layers.quota import remove_directory
from sandbox.listings import list_folder
from sandbox.processes import find_process


def found(state_dir: Path) -> tuple[Path, ...]:
    """Directories under quota and drafts. To be looked for before the journal is read: what is made after
    that may be too new for it."""
    places = [*list_folder(state_dir / "layers"), *list_folder(state_dir / "snapshots", ".draft-*")]
    return tuple(path for path in sorted(places) if not path.name.startswith("template-"))


def ownerless(places: Iterable[Path], live: Set[str]) -> Iterator[Path]:
    """Those of `found` that belong to none of these sandboxes, and to no process that lives."""
    for path in places:
        maker = path.name.removeprefix(".").split("-")
        is_draft = maker[0] == "draft" and len(maker) > 2 and maker[1].isdecimal()
        owned = find_process(int(maker[1])) is not None if is_draft else path.name in live
        if not owned and os.path.lexists(path):
            yield path


def ownerless_loops(state_key: str) -> Iterator[Path]:
    """Devices of this state directory whose process has died and that something still holds."""
    for loop in loops.list_loops():
        if loop.state == state_key and not loop.owner.is_alive():
            yield loop.device


def remove(path: Path) -> None:
    """One of `ownerless`, with the limits that it may have."""
    if path.is_dir() and not path.is_symlink():
        remove_directory(path)
    else:
        path.unlink(missing_ok=True)
