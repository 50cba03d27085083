"""The memory that a process may use: the machine's, or the tightest limit around it."""

from pathlib import Path

import psutil
import pytest

from engine.cache.host_memory import host_memory_bytes

TOTAL = psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/a/b", {"a/b/memory.max": "max", "a/memory.max": "1000000"}, 1_000_000),
        ("0::/a/b", {"a/b/memory.max": "500000", "a/memory.max": "1000000"}, 500_000),
        ("5:memory:/x\n0::/", {"memory/x/memory.limit_in_bytes": "700000"}, 700_000),
        ("5:memory:/x", {"memory/x/memory.limit_in_bytes": str(2**63 - 4096)}, TOTAL),
        ("0::/", {}, TOTAL),
        ("", {}, TOTAL),
    ],
)
def test_the_tightest_limit_counts(tmp_path: Path, cgroup: str, files: dict[str, str], expected: int) -> None:
    place = tmp_path / "proc" / "self" / "cgroup"
    place.parent.mkdir(parents=True)
    place.write_text(cgroup + "\n" if cgroup else "")
    for name, text in files.items():
        path = tmp_path / "sys" / "fs" / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert host_memory_bytes(tmp_path) == expected


def test_without_proc_the_machine_counts(tmp_path: Path) -> None:
    assert host_memory_bytes(tmp_path) == TOTAL
