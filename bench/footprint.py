"""What sandboxes cost a machine, from /proc: memory by who holds it, descriptors, threads."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sandbox import cgroups

# Of /proc/meminfo: what the kernel holds because of processes, namespaces, mounts and files in memory.
KERNEL = ("SUnreclaim", "SReclaimable", "PageTables", "KernelStack", "Percpu", "Shmem")
_MEMORY = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class Footprint:
    """`parts` in MiB."""

    parts: Mapping[str, float]
    fds: int
    threads: int

    @property
    def mib(self) -> float:
        return sum(self.parts.values())

    def minus(self, before: "Footprint") -> "Footprint":
        """What has come since."""
        parts = {name: value - before.parts[name] for name, value in self.parts.items()}
        return Footprint(parts, self.fds - before.fds, self.threads - before.threads)


def take(groups: Iterable[Path]) -> Footprint:
    """Of this process, the processes in these cgroups and the kernel. A millisecond a process."""
    memory = _meminfo()
    parts = {
        "sandboxes": sum(_pss_kib(pid) for group in groups for pid in cgroups.members(group)) / 1024,
        "owner": _pss_kib(os.getpid()) / 1024,
        **{name: memory[name] / 1024 for name in KERNEL},
    }
    return Footprint(parts, _count(Path("/proc/self/fd")), _count(Path("/proc/self/task")))


def available_mib() -> int:
    """What programs can still have on this machine."""
    return _meminfo()["MemAvailable"] >> 10


def _meminfo() -> dict[str, int]:
    lines = (line.split() for line in _MEMORY.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in lines}


def _pss_kib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def _count(folder: Path) -> int:
    return len(list(folder.iterdir()))
