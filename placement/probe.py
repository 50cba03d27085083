"""Reads this machine's topology from /sys and /proc. The only file of placement that looks at a machine.

It reads a few small files and does not block. What a kernel does not tell (no NUMA, no topology of cores)
becomes the simplest thing that is true: one domain, each hardware thread a core.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from placement.topology import Core, Device, DeviceKind, Domain, Node, Topology

_UNLIMITED_BYTES = 2**60  # cgroup v1 says "no limit" with a huge number


def probe(usable_cpus: frozenset[int], *, root: Path = Path("/"), name: str = "local") -> Topology:
    """This machine as a topology of one node.

    `usable_cpus`: what the process may run on (`os.sched_getaffinity(0)`). `root`: where sys and proc lie.
    """
    memory = _meminfo(root / "proc/meminfo")
    limit, room = _memory_limit(root)
    total = min(memory.get("MemTotal", 0), limit)
    free = min(memory.get("MemAvailable", memory.get("MemFree", 0)), room)
    numbers = _domain_numbers(root) or [0]
    single = len(numbers) == 1
    devices = _devices(root)
    domains: list[Domain] = []
    for number in numbers:
        found = devices.get(number, []) + (devices.get(-1, []) if number == numbers[0] else [])
        # With one domain the machine's own figures are better: memory that was plugged in later is not
        # counted in the domain's.
        own_total, own_free = (total, free) if single else _domain_memory(root, number, room)
        domains.append(Domain(number, _cores(root, number, usable_cpus), own_total, own_free, tuple(found)))
    return Topology((Node(name, tuple(domains), _cpu_limit(root)),))


def _domain_numbers(root: Path) -> list[int]:
    places = (root / "sys/devices/system/node").glob("node[0-9]*")
    return sorted(int(place.name.removeprefix("node")) for place in places)


def _domain_memory(root: Path, number: int, room: int) -> tuple[int, int]:
    found = _meminfo(root / f"sys/devices/system/node/node{number}/meminfo")
    free = found.get("MemFree", 0) + found.get("FilePages", 0) // 2  # half of the page cache can be dropped
    return found.get("MemTotal", 0), min(free, room)


def _cores(root: Path, number: int, usable_cpus: frozenset[int]) -> tuple[Core, ...]:
    listed = _read(root / f"sys/devices/system/node/node{number}/cpulist")
    cpus = _cpu_list(listed) & usable_cpus if listed else usable_cpus
    by_core: dict[tuple[int, int], list[int]] = {}
    for cpu in sorted(cpus):
        place = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        package = int(_read(place / "physical_package_id") or 0)
        core = int(_read(place / "core_id") or cpu)
        by_core.setdefault((package, core), []).append(cpu)
    # Core ids repeat between packages; the first hardware thread names a core uniquely.
    return tuple(Core(threads[0], tuple(threads)) for threads in by_core.values())


def _devices(root: Path) -> Mapping[int, list[Device]]:
    """Devices by domain; -1 where the kernel does not say."""
    found: dict[int, list[Device]] = {}

    def add(kind: DeviceKind, name: str, place: Path) -> None:
        number = int(_read(place / "numa_node") or -1)
        found.setdefault(number, []).append(Device(name, kind))

    gpus = sorted((root / "proc/driver/nvidia/gpus").glob("*"))
    for index, gpu in enumerate(gpus):
        add("gpu", f"gpu{index}", root / "sys/bus/pci/devices" / gpu.name.lower())
    for nic in sorted((root / "sys/class/net").glob("*")):
        if (nic / "device").exists():
            add("nic", nic.name, nic / "device")
    for disk in sorted((root / "sys/class/nvme").glob("nvme*")):
        add("nvme", disk.name, disk / "device")
    return found


def _memory_limit(root: Path) -> tuple[int, int]:
    """The smallest limit, and the smallest room under one, of this process's cgroup and those above it."""
    found: list[tuple[int, int]] = [(_UNLIMITED_BYTES, _UNLIMITED_BYTES)]
    base = root / "sys/fs/cgroup"
    for controllers, path in _own_cgroups(root):
        if "memory" in controllers:
            found += _limits(base / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")
        if controllers == [""]:
            found += _limits(base, path, "memory.max", "memory.current")
    return min(limit for limit, _ in found), min(room for _, room in found)


def _limits(base: Path, path: str, limit_file: str, usage_file: str) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    place = base / path.lstrip("/")
    while place.is_relative_to(base):
        limit, usage = _read(place / limit_file), _read(place / usage_file)
        if limit.isdigit():
            found.append((int(limit), max(0, int(limit) - int(usage or 0))))
        place = place.parent
    return found


def _cpu_limit(root: Path) -> float | None:
    """The quota of this process's own cgroup in cores, None for unlimited."""
    for controllers, path in _own_cgroups(root):
        base = root / "sys/fs/cgroup"
        if "cpu" in controllers:
            own = base / "cpu" / path.lstrip("/")
            quota = _read(own / "cpu.cfs_quota_us")
            period = _read(own / "cpu.cfs_period_us")
        elif controllers == [""]:
            quota, _, period = _read(base / path.lstrip("/") / "cpu.max").partition(" ")
        else:
            continue
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            return int(quota) / int(period)
    return None


def _own_cgroups(root: Path) -> list[tuple[list[str], str]]:
    """(controllers, path) of every hierarchy; the unified one has the controllers ['']."""
    lines = _read(root / "proc/self/cgroup").splitlines()
    parts = [line.split(":", 2) for line in lines]
    return [(part[1].split(","), part[2]) for part in parts if len(part) == 3]


def _meminfo(path: Path) -> dict[str, int]:
    """Bytes by name."""
    found = re.findall(r"(\w+):\s+(\d+) kB", _read(path))
    return {name: int(value) * 1024 for name, value in found}


def _cpu_list(text: str) -> frozenset[int]:
    """`0-3,8` as numbers."""
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _read(path: Path) -> str:
    """The file's text without the newline at its end; empty where it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
