"""Cgroups of sandboxes on hosts with version 1, version 2 or both.

Sandboxes live under `dockyard/STATE/ID` in every hierarchy that they use, STATE being short for one state
directory: so everything under a STATE that no journal knows is a leftover, whoever made it.
"""

import atexit
import errno
import hashlib
import os
import signal
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from sandbox.errors import AuthError, CapacityError
from sandbox.kernel_files import read_small, write_small
from sandbox.limits import LimitName, Limits
from sandbox.listings import list_folder
from sandbox.refusals import Attempt, Counts

# Buffers of sockets, which version 1 counts apart from other memory: that much more in proportion, at least.
SOCKET_SHARE, LEAST_SOCKET_BYTES = 8, 2 << 20
_SOCKET_FILE = "memory.kmem.tcp.limit_in_bytes"

Controller = Literal["memory", "pids", "cpu"]
CONTROLLERS: tuple[Controller, ...] = ("memory", "pids", "cpu")
TOP = "dockyard"
ABANDONED_S = 600.0  # a group that old and empty belongs to nobody
CPU_PERIOD_US = 100_000  # the kernel's own for a new group, so version 1 is not told it
REMOVE_PATIENCE_S = 5.0
_CHILDLESS = 2  # links of a group's directory without groups below it


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """One mounted cgroup tree. `controllers` are those of ours that it can give to children."""

    root: Path
    version: Literal[1, 2]
    controllers: frozenset[Controller]


@dataclass(frozen=True, slots=True)
class Counters:
    """How often limits have bitten since the sandbox was made. Not the groups' own: what the network policy
    refused."""

    oom_kills: int = 0
    refused_forks: int = 0
    refused: Counts = field(default_factory=lambda: MappingProxyType[Attempt, int]({}))


@dataclass(frozen=True, slots=True)
class Group:
    """One sandbox's directory in one hierarchy."""

    path: Path
    hierarchy: Hierarchy


def parse_hierarchies(mounts: str) -> list[tuple[Path, Literal[1, 2], frozenset[str]]]:
    """Cgroup mounts of a /proc/mounts text: root, version, options. Pure."""
    found: list[tuple[Path, Literal[1, 2], frozenset[str]]] = []
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 4 or fields[2] not in ("cgroup", "cgroup2"):
            continue
        version: Literal[1, 2] = 1 if fields[2] == "cgroup" else 2
        found.append((Path(fields[1]), version, frozenset(fields[3].split(","))))
    return found


def find_hierarchies(mounts: Path = Path("/proc/mounts"), *, below: str = "") -> tuple[Hierarchy, ...]:
    """Hierarchies in which this process may make groups, or may below a group, which then is no sweep's to
    remove for a while. Empty for an ordinary user without delegation."""
    look = _usable.__wrapped__ if below else _usable  # what is below a group changes with those that make it
    return look(mounts.read_text(), below, os.geteuid())


@lru_cache(maxsize=8)
def _usable(mounts: str, below: str, user: int) -> tuple[Hierarchy, ...]:
    """By a user, who may do the same with the same mounts."""
    del user
    found: list[Hierarchy] = []
    for root, version, options in _counting(mounts):
        if not os.access(root / below, os.W_OK, effective_ids=True):
            continue
        names = options
        try:
            if below:
                os.utime(root / below)  # or a sweep that finds it empty may take it for abandoned
            if version == 2:
                names = frozenset((root / below / "cgroup.controllers").read_text().split())
        except FileNotFoundError:  # one just has
            continue
        controllers: frozenset[Controller] = frozenset(name for name in CONTROLLERS if name in names)
        if controllers or version == 2:
            found.append(Hierarchy(root, version, controllers))
    return tuple(found)


def _counting(mounts: str) -> list[tuple[Path, Literal[1, 2], frozenset[str]]]:
    """Those of `parse_hierarchies` in which a sandbox gets a group."""
    return [each for each in parse_hierarchies(mounts) if each[1] == 2 or not each[2].isdisjoint(CONTROLLERS)]


def counting_roots(mounts: Path = Path("/proc/mounts")) -> tuple[Path, ...]:
    """Roots of all hierarchies in which a sandbox gets a group where this process may make one."""
    return tuple(root for root, _, _ in _counting(mounts.read_text()))


def enforceable(hierarchies: Sequence[Hierarchy]) -> frozenset[LimitName]:
    """Limits that these hierarchies can enforce."""
    return frozenset(name for hierarchy in hierarchies for name in hierarchy.controllers)


def gaps(hierarchies: Sequence[Hierarchy]) -> tuple[str, ...]:
    """What these hierarchies leave open of a limit that they enforce, in words."""
    for each in hierarchies:
        if "memory" in each.controllers and each.version == 1 and not (each.root / _SOCKET_FILE).exists():
            return ("sockets are not limited here: what is sent and not read counts as nobody's memory",)
    return ()


def state_key(state_dir: Path) -> str:
    """The STATE part of a group's path: the same for every process that uses this directory, and with the
    user's id where that is not root."""
    key = _digest(state_dir)
    return key if os.geteuid() == 0 else f"u{os.geteuid()}x{key}"


@lru_cache(maxsize=64)
def _digest(directory: Path) -> str:
    return hashlib.sha256(os.fsencode(directory.resolve())).hexdigest()[:12]


def plan_groups(hierarchies: Sequence[Hierarchy], state: str, sandbox_id: str) -> tuple[Group, ...]:
    """Where a sandbox's groups will be. Pure; `Groups.create` makes them."""
    return tuple(Group(Path(f"{each.root}/{TOP}/{state}/{sandbox_id}"), each) for each in hierarchies)


class Groups:
    """A sandbox's groups. `create` and `remove` are the owner's; the rest may be called from any thread."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = tuple(groups)
        self._last = Counters()

    @property
    def paths(self) -> tuple[Path, ...]:
        """Directories that the sandbox's first process joins."""
        return tuple(group.path for group in self._groups)

    @property
    def unified(self) -> Path | None:
        """The one of version 2, to which programs can be attached."""
        return next((group.path for group in self._groups if group.hierarchy.version == 2), None)

    @property
    def memory(self) -> Group | None:
        """The one that counts memory."""
        return next((each for each in self._groups if "memory" in each.hierarchy.controllers), None)

    def create(self, limits: Limits) -> None:
        """Makes the groups and sets the limits. CapacityError when the kernel refuses; what was made until
        then stays for `remove`."""
        self.make()
        self.limit(limits)

    def make(self) -> None:
        """The first half of `create`: whoever is in a group now is not limited yet."""
        for group in self._groups:
            with _explained(group):
                _make_group(group)

    def limit(self, limits: Limits) -> None:
        """The second half."""
        for group in self._groups:
            with _explained(group):
                _write_limits(group, limits)

    def counters(self) -> Counters:
        """Reads the kernel's counters; microseconds. Zeros where there is no such controller; where they
        cannot be read (no descriptor is free), the ones that were read last."""
        with suppress(OSError):
            self._last = self._read_counters()
        return self._last

    def _read_counters(self) -> Counters:
        oom_kills = refused_forks = 0
        for group in self._groups:
            memory = "memory.oom_control" if group.hierarchy.version == 1 else "memory.events"
            if "memory" in group.hierarchy.controllers:
                oom_kills += sum(_field(f"{each}/{memory}", "oom_kill") for each in _subtree(group.path))
            if "pids" in group.hierarchy.controllers:
                refused_forks += sum(_field(f"{each}/pids.events", "max") for each in _subtree(group.path))
        return Counters(oom_kills, refused_forks)

    def remove(self) -> None:
        """Kills what is left in the groups and removes them. Idempotent. Blocks until the kernel has let go,
        CapacityError after 5 seconds."""
        for group in self._groups:
            remove_group(group.path)


@contextmanager
def _explained(group: Group) -> Generator[None]:
    try:
        yield
    except OSError as error:
        hint = "see whether this host delegates cgroups with `dockyard doctor`"
        raise CapacityError(f"cgroup {group.path}: {error.strerror}", hint=hint) from error


def remove_group(path: Path) -> None:
    """Kills every process in a group and below it, and removes the directories. Nothing there: no error.
    CapacityError where they are still in use after 5 seconds, AuthError where they are not this user's.
    """
    give_up = time.monotonic() + REMOVE_PATIENCE_S
    while True:
        try:
            path.rmdir()  # mostly it is empty and childless by now, and this works with no descriptor free
            return
        except FileNotFoundError:
            return
        except OSError as error:
            refused = error  # it is in use
        for each in reversed(list(_subtree(path))):
            try:
                each.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                _kill_members(each)
        if not path.exists():
            return
        if isinstance(refused, PermissionError):
            hint = "remove it as its user, or as root"
            raise AuthError(f"cgroup {path} is another user's: {refused.strerror}", hint=hint) from refused
        if time.monotonic() > give_up:
            raise CapacityError(f"cgroup {path} is still in use", hint="a process in it cannot be killed")
        time.sleep(0.001)  # the kernel frees a group a moment after its last process has gone


def remove_abandoned(roots: Sequence[Path], now_s: float) -> None:
    """Removes old groups without a process, and old `dockyard/STATE` without groups, of any state directory:
    where it is gone, nobody else would. A user's owner cannot make his STATE again.

    A sandbox that lives has its init in its group; one that is being made has had its group for a moment.
    """
    for root in roots:
        for state in _folders(root / TOP):
            for each in (*_folders(state), state):
                with suppress(OSError):  # in use, or gone meanwhile
                    if now_s - each.stat().st_mtime > ABANDONED_S:
                        each.rmdir()


def remove_empty_parents(roots: Sequence[Path], state: str) -> None:
    """Removes `dockyard/STATE` and `dockyard` where they are empty; others may be using them."""
    for root in roots:
        for path in (root / TOP / state, root / TOP):
            try:
                path.rmdir()
            except OSError:
                break  # absent, or in use: both are fine


_KEPT: set[tuple[Path, str]] = set()


def keep_parents(roots: Sequence[Path], state: str) -> None:
    """`dockyard/STATE` stays until this process ends: the next sandbox needs it again, and making it takes as
    long as that sandbox's own groups."""
    _KEPT.update((root, state) for root in roots)


@atexit.register
def _let_parents_go() -> None:
    for root, state in _KEPT:
        remove_empty_parents([root], state)


def members(path: Path) -> list[int]:
    """Pids in a group and below it."""
    pids: list[int] = []
    for each in _subtree(path):
        with _unless_gone():
            pids += [int(pid) for pid in (each / "cgroup.procs").read_text().split()]
    return pids


def list_groups(roots: Sequence[Path], state: str) -> list[Path]:
    """Every sandbox's group of this state directory."""
    return [group for root in roots for group in _folders(root / TOP / state)]


def _folders(parent: Path) -> list[Path]:
    return [path for path in list_folder(parent) if path.is_dir()]


def mount_roots(mounts: Path = Path("/proc/mounts")) -> tuple[Path, ...]:
    """Roots of all cgroup hierarchies: an OCI runtime may use more of them than we do."""
    return tuple(root for root, _, _ in parse_hierarchies(mounts.read_text()))


def _make_group(group: Group) -> None:
    for _ in range(10):
        try:
            if group.hierarchy.version == 2 and group.hierarchy.controllers:
                _make_above(group.path.parent)
                _delegate(group)
            group.path.mkdir()
            return
        except FileNotFoundError:  # the first one, or another process has just removed the empty parent
            with suppress(FileNotFoundError):  # or removes its parent now
                _make_above(group.path.parent)
    raise CapacityError(
        f"cgroup {group.path} keeps disappearing", hint="run `dockyard down` once, then again"
    )


def _make_above(place: Path) -> None:
    """TOP/STATE. Whatever the umask, users walk through TOP to what a helper has handed them."""
    for each in (place,) if place.parent.is_dir() else (place.parent, place):
        with suppress(FileExistsError):
            each.mkdir()
            each.chmod(0o755)


def _delegate(group: Group) -> None:
    """Version 2 gives a controller to children only where every ancestor enables it."""
    wanted = " ".join(f"+{name}" for name in sorted(group.hierarchy.controllers))
    for ancestor in (group.hierarchy.root, group.path.parent.parent, group.path.parent):
        control = ancestor / "cgroup.subtree_control"
        if not group.hierarchy.controllers <= set(control.read_text().split()):
            control.write_text(wanted)


def _write_limits(group: Group, limits: Limits) -> None:
    for name, value in settings(group.hierarchy, limits):
        # Swap accounting may be compiled out or off; without swap the memory limit says it all. Without a
        # limit on sockets `gaps` says so.
        is_optional = name in _OPTIONAL_FILES
        with suppress(FileNotFoundError) if is_optional else nullcontext():
            write_small(f"{group.path}/{name}", value, makes=not is_optional)


_OPTIONAL_FILES = ("memory.memsw.limit_in_bytes", "memory.swap.max", _SOCKET_FILE)


def settings(hierarchy: Hierarchy, limits: Limits) -> list[tuple[str, str]]:
    """Files and values for one hierarchy, in the order in which the kernel takes them. Pure."""
    written: list[tuple[str, str]] = []
    first = hierarchy.version == 1
    if "memory" in hierarchy.controllers and limits.memory_bytes is not None:
        memory = str(limits.memory_bytes)
        written.append(("memory.limit_in_bytes" if first else "memory.max", memory))
        written.append(("memory.memsw.limit_in_bytes", memory) if first else ("memory.swap.max", "0"))
        if first:  # version 2 counts them as memory
            sockets = max(LEAST_SOCKET_BYTES, limits.memory_bytes // SOCKET_SHARE)
            written.append((_SOCKET_FILE, str(sockets)))
    if "pids" in hierarchy.controllers and limits.pids is not None:
        written.append(("pids.max", str(limits.pids)))
    if "cpu" in hierarchy.controllers and limits.cpus is not None:
        quota = max(1000, int(limits.cpus * CPU_PERIOD_US))
        if first:  # one file: at each that is written, the kernel goes through all groups there are
            written.append(("cpu.cfs_quota_us", str(quota)))
        else:
            written.append(("cpu.max", f"{quota} {CPU_PERIOD_US}"))
    return written


def _kill_members(path: Path) -> None:
    try:
        (path / "cgroup.kill").write_text("1")  # version 2: atomic, whatever forks
        return
    except OSError:
        pass
    for pid in members(path):
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # the caller sees that the group is there yet
            continue


def _subtree(path: Path) -> Iterator[Path]:
    """A group and those below it, parents first."""
    try:
        if path.stat().st_nlink == _CHILDLESS:
            yield path
            return
        children = [entry.path for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return
    yield path
    for child in children:
        yield from _subtree(Path(child))


def _field(path: str, name: str) -> int:
    """0 where there is no such file."""
    text = ""
    with _unless_gone():
        text = read_small(path)
    return next((int(line.split()[1]) for line in text.splitlines() if line.split()[:1] == [name]), 0)


@contextmanager
def _unless_gone() -> Generator[None]:
    """A file of a group's is read, which may go before it is opened or, ENODEV, after that."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENODEV):
            raise
