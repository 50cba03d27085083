"""Sandboxes as one makes them with crun, runc or bubblewrap alone: the same root, limits and table of calls.

The root is an overlay of the skeleton, mounted when the sandbox is made. Threads that run peers lie in
mount namespaces of their own, in which version 2 cgroups are hidden: crun takes no hybrid. The rest of the
process sees the host as it is, so that ours has all that its policy asks for; `check_whole` holds it to that.
"""

import ctypes
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import IO, Any

from sandbox import Sandbox, cgroups
from sandbox.images import Image, prepare_image
from sandbox.places import INIT_BINARY, default_state_dir, default_toolkit
from sandbox.policy.seccomp import filter_program, this_machine
from sandbox.substrates.base import ROOT_AT
from sandbox.substrates.oci import oci_config

_NEW_MOUNTS = 0x00020000
_PRIVATE, _RECURSIVE, _DETACH = 1 << 18, 1 << 14, 2
_UNIFIED = Path("/sys/fs/cgroup/unified")
_HOST_MOUNTS = Path("/proc/1/mounts")
_FIRST_UID, _UIDS = 0x60000000, 65536
_LIBC = ctypes.CDLL(None, use_errno=True)
_GROUP = "dockyard-peer"
TRUE = "/usr/bin/true"
MEMORY_BYTES, PIDS = 512 << 20, 128


@dataclass(frozen=True, slots=True)
class Peer:
    """One tool and how it makes a sandbox."""

    name: str
    program: str
    as_program: bool = False  # it gets the table of calls as instructions, as ours does; else by names


def peers() -> tuple[Peer, ...]:
    """Those that are installed. crun twice: a table by names it turns into instructions, at each start."""
    kinds = (
        ("crun", "crun", True),
        ("crun by names", "crun", False),
        ("runc", "runc", False),
        ("bwrap", "bwrap", True),
    )
    found = ((name, shutil.which(tool), as_program) for name, tool, as_program in kinds)
    return tuple(Peer(name, path, as_program) for name, path, as_program in found if path is not None)


def threads_for_peers(count: int) -> ThreadPoolExecutor:
    """Entering their namespaces costs what they run nothing. Raises BrokenThreadPool at the first use without
    root."""
    return ThreadPoolExecutor(count, initializer=_enter_own_mounts)


def _enter_own_mounts() -> None:
    """For the rest of the calling thread."""
    _checked(_LIBC.unshare(_NEW_MOUNTS), "unshare")
    _checked(_LIBC.mount(b"none", b"/", None, _RECURSIVE | _PRIVATE, None), "make mounts private")
    if _UNIFIED.is_mount():
        _checked(_LIBC.umount2(bytes(_UNIFIED), _DETACH), "hide version 2 cgroups")


def check_whole(box: Sandbox) -> None:
    """Raises SystemExit for a sandbox without a cgroup in a hierarchy that this host has: freezer, guard and
    egress hang on version 2."""
    state = cgroups.state_key(default_state_dir())
    for root in _roots():
        if not (root / cgroups.TOP / state / box.id).is_dir():
            raise SystemExit(
                f"sandbox {box.id} has no cgroup under {root}, so it is not under the full policy"
            )


@cache
def _roots() -> tuple[Path, ...]:
    """Of the hierarchies that this host has and sandboxes use, wherever this thread lies."""
    found = cgroups.parse_hierarchies(_HOST_MOUNTS.read_text())
    return tuple(root for root, version, names in found if version == 2 or names & set(cgroups.CONTROLLERS))


class Workshop:
    """A folder with bundles. Sandboxes of several threads may be made at once."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._numbers = folder, count()
        folder.chmod(0o711)  # the sandboxes' uid walks through
        state = default_state_dir()
        self.image = prepare_image("host", state_dir=state, init=INIT_BINARY, toolkit=default_toolkit(state))
        self._skeleton = _owned_copy(self.image.skeleton, folder / "skeleton")
        (folder / "filter").write_bytes(filter_program(this_machine()))
        # A runtime gives the sandbox's uid what it finds as input, output and error: no device of the host's.
        self._stdio = (folder / "stdio").open("w+b")

    def bundle(self, args: Sequence[str], peer: Peer) -> "Bundle":
        """A place for one sandbox; nothing is mounted yet. Not timed."""
        place = self._folder / str(next(self._numbers))
        for name in ("upper", "work", "root"):
            (place / name).mkdir(parents=True)
        (place / "config.json").write_text(json.dumps(_config(self.image, args, place, peer)))
        os.chown(place / "upper", _FIRST_UID, _FIRST_UID)
        return Bundle(place, self._skeleton, self._folder / "filter", self.image, self._stdio)

    def close(self) -> None:
        """Removes the groups above those that the runtimes have removed."""
        self._stdio.close()
        for parent in Path("/sys/fs/cgroup").glob(f"*/{_GROUP}"):
            for group in (*parent.glob("*"), parent):
                with suppress(OSError):  # a file of the kernel's, or in use by another
                    group.rmdir()


@dataclass(frozen=True, slots=True)
class Bundle:
    """`mount` and `command` are what is timed; `remove` cleans up."""

    place: Path
    skeleton: Path
    filter: Path
    image: Image
    stdio: IO[bytes]  # for what is to be nobody's

    def mount(self) -> None:
        options = f"lowerdir={self.skeleton},upperdir={self.place}/upper,workdir={self.place}/work"
        _checked(
            _LIBC.mount(b"overlay", bytes(self.place / "root"), b"overlay", 0, options.encode()), "overlay"
        )

    def run(self, peer: Peer) -> None:
        """Makes the sandbox, waits for its program. CalledProcessError where that fails."""
        self.mount()
        stdio = self.stdio
        subprocess.run(
            self.command(peer), check=True, stdin=stdio, stdout=stdio, stderr=stdio, cwd=self.place
        )

    def command(self, peer: Peer, *words: str) -> list[str]:
        """`run` by default; another of an OCI runtime's commands with its words."""
        if peer.name == "bwrap":
            return ["sh", "-c", f'exec "$@" 9<{self.filter}', "sh", *self._bubblewrap(peer.program), TRUE]
        return [peer.program, "--root", str(self.place / "state"), *(words or ("run", self.name))]

    @property
    def name(self) -> str:
        return f"peer-{os.getpid()}-{self.place.name}"

    def remove(self) -> None:
        _LIBC.umount2(bytes(self.place / "root"), _DETACH)
        shutil.rmtree(self.place, ignore_errors=True)

    def _bubblewrap(self, program: str) -> list[str]:
        words = [program, "--unshare-all", "--clearenv", "--cap-drop", "ALL", "--uid", "0", "--gid", "0"]
        words += ["--seccomp", "9", "--bind", str(self.place / "root"), "/"]
        words += ["--proc", "/proc", "--dev", "/dev"]
        for bind in self.image.binds:
            words += ["--ro-bind", str(bind.source), bind.target]
        return [*words, "--"]


def _config(image: Image, args: Sequence[str], place: Path, peer: Peer) -> dict[str, Any]:
    cgroup = f"/{_GROUP}/{os.getpid()}-{place.name}"
    config = oci_config(args, owner_uid=_FIRST_UID, cgroup=cgroup, as_program=peer.as_program)
    config["root"] = {"path": "root", "readonly": False}
    config["linux"]["namespaces"] = [
        {"type": kind} for kind in ("user", "pid", "mount", "ipc", "uts", "cgroup", "network")
    ]
    config["linux"]["resources"] = {
        "memory": {"limit": MEMORY_BYTES},
        "pids": {"limit": PIDS},
        "cpu": {"quota": 200_000, "period": 100_000},
    }
    for mount in config["mounts"]:  # of the root's own folders, which lies elsewhere here
        mount["source"] = mount["source"].replace(ROOT_AT, str(place / "root"), 1)
    read_only = ["rbind", "ro", "nosuid", "nodev"]
    config["mounts"] += [
        {"destination": bind.target, "type": "bind", "source": str(bind.source), "options": read_only}
        for bind in image.binds
    ]
    config["process"]["env"] = [f"{key}={value}" for key, value in image.env.items()]
    return config


def _owned_copy(skeleton: Path, target: Path) -> Path:
    """A runtime makes what is missing of a root as the sandbox's own uid, so that owns it."""
    shutil.copytree(skeleton, target, symlinks=True)
    for path in (target, *target.rglob("*")):
        os.chown(path, _FIRST_UID, _FIRST_UID, follow_symlinks=False)
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)
    return target


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
