"""What sandboxes could leave on a machine, counted for all of it: what only an audit of ours finds is ours to
keep at zero, what the kernel counts must not grow with the number of sandboxes."""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from sandbox_places import count_fds

from sandbox.egress.libbpf import load_library

NAMESPACES = ("mnt", "net", "pid", "user", "ipc", "uts", "cgroup")
Counts = dict[str, int]
_STATE, _PARENT, _FLAGS = 0, 1, 6  # fields of /proc/PID/stat, counted after the name
_KERNEL_THREAD = 0x00200000


def take() -> Counts:
    """Some milliseconds. Namespaces are those of processes that this one may look into."""
    return {
        "fds": count_fds(),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
        "processes": sum(1 for _ in _processes()),
        "zombies": _own_zombies(),
        "namespaces": len(set(_namespaces())),
        "cgroups": _cgroups(),
        "loops": len(list(Path("/sys/block").glob("loop*/loop/backing_file"))),
        "links": len(list(Path("/sys/class/net").iterdir())),
        "files": sum(1 for folder in ("/tmp", "/dev/shm", "/run") for _ in Path(folder).glob("*dockyard*")),
        **_bpf(),
    }


def unreclaimable_kib() -> int:
    """Slabs that the kernel cannot give up."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("SUnreclaim:"))


def grown(before: Counts, now: Counts, allowed: int = 0) -> Counts:
    """What there is more of, by more than that."""
    return {name: now[name] - count for name, count in before.items() if now[name] - count > allowed}


def _processes() -> Iterator[Path]:
    """Zombies too; no kernel threads, which come and go with load."""
    for path, fields in _stats():
        if not int(fields[_FLAGS]) & _KERNEL_THREAD:
            yield path


def _own_zombies() -> int:
    """Children of this process that nobody has waited for."""
    own = str(os.getpid())
    return sum(1 for _, fields in _stats() if fields[_STATE] == "Z" and fields[_PARENT] == own)


def _stats() -> Iterator[tuple[Path, list[str]]]:
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            yield path, (path / "stat").read_text(errors="replace").rpartition(")")[2].split()


def _namespaces() -> Iterator[str]:
    for process in _processes():
        for name in NAMESPACES:
            with suppress(OSError):
                yield os.readlink(process / "ns" / name)  # noqa: PTH115 - a link to nothing


def _cgroups() -> int:
    """Of every hierarchy, those included that are removed and still held by something."""
    lines = Path("/proc/cgroups").read_text().splitlines()[1:]
    live = sum(int(line.split()[2]) for line in lines)
    dying = 0
    for stat in Path("/sys/fs/cgroup").glob("**/cgroup.stat"):
        dying = max(dying, int(stat.read_text().split("nr_dying_descendants ")[1].split()[0]))
    return live + dying


def _bpf() -> Counts:
    """Programs and maps of the kernel; nothing without root or libbpf."""
    if os.geteuid() != 0:
        return {}
    with suppress(OSError):
        library = load_library()
        return {
            "programs": _count_ids(library.bpf_prog_get_next_id),
            "maps": _count_ids(library.bpf_map_get_next_id),
        }
    return {}


def _count_ids(next_id: Callable[..., int]) -> int:
    count, id = 0, ctypes.c_uint32(0)
    while next_id(id, ctypes.byref(id)) == 0:
        count += 1
    return count
