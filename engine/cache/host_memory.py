"""How much memory this process may use: of the machine, or of the tightest cgroup around it."""

from pathlib import Path

import psutil


def host_memory_bytes(root: Path = Path("/")) -> int:
    """`root`: where proc and sys lie. What cannot be read is no limit."""
    limits = [psutil.virtual_memory().total]
    base = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            limits += _limits(base, path, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _limits(base / "memory", path, "memory.limit_in_bytes")
    return min(limits)


def _limits(base: Path, path: str, name: str) -> list[int]:
    """Of a cgroup and those above it."""
    place = base / path.lstrip("/")
    found: list[int] = []
    while place.is_relative_to(base):
        text = _read(place / name)
        found += [int(text)] if text.isdigit() else []
        place = place.parent
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
