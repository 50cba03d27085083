"""Processes of a sandbox, seen from inside and from the host."""

from pathlib import Path

from sandbox import Sandbox


def processes(box: Sandbox) -> list[str]:
    """Command lines of all processes but init, the minder and ps itself."""
    lines = box.commands.run(["ps", "-eo", "args="]).stdout.splitlines()
    return [line for line in lines if "dockyard/init" not in line and not line.startswith("ps ")]


def children(pid: int) -> list[int]:
    """On the host, the oldest first."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def uid_of(pid: int) -> int:
    """Its real user on the host."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("Uid:")))
