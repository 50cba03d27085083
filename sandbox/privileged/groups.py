"""Folders of cgroups: dockyard/STATE in every tree that counts something of ours, handed to one user."""

import os
from contextlib import suppress
from pathlib import Path

_CONTROLLERS = frozenset({"memory", "pids", "cpu"})


def find_tops(mounts: str) -> list[Path]:
    """Our folder in each tree, those of version 2 first; of the text of /proc/mounts."""
    found = [line.split(" ")[1:4] for line in mounts.splitlines()]
    unified = [root for root, kind, _ in found if kind == "cgroup2"]
    first = [root for root, kind, names in found if kind == "cgroup" and _CONTROLLERS & {*names.split(",")}]
    return [Path(root, "dockyard") for root in unified + first]


def hand_over(place: Path, uid: int, gid: int) -> None:
    """Makes a state's folder where it is not there. OSError."""
    place.mkdir(parents=True, exist_ok=True)
    place.parent.chmod(0o755)  # whoever of root's has made it
    for above in (place.parents[1], place.parent):
        with suppress(FileNotFoundError):  # version 1 hands everything down
            for name in _CONTROLLERS.intersection((above / "cgroup.controllers").read_text().split()):
                write(above / "cgroup.subtree_control", f"+{name}")
    for name in (".", "cgroup.procs", "cgroup.threads", "cgroup.subtree_control", "tasks"):
        with suppress(FileNotFoundError):
            os.chown(place / name, uid, gid)


def bury(place: Path) -> bool:
    """Kills and removes all at and below it, as far as the kernel lets go now. Whether something is left.
    Processes are killed through version 2; where there is none they end with their owner's connections."""
    found = [str(place)]
    for each in found:
        with suppress(OSError):
            found += [entry.path for entry in os.scandir(each) if entry.is_dir(follow_symlinks=False)]
    for path in map(Path, reversed(found)):
        with suppress(OSError):
            write(path / "cgroup.kill", "1")
        with suppress(OSError):
            path.rmdir()
    return place.exists()


def write(path: Path, value: str) -> None:
    """To a file that is there. OSError."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CLOEXEC), "wb", buffering=0) as file:
        file.write(value.encode())
