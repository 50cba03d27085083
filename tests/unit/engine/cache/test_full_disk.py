"""A disk that is really full: a file system of 128 KiB, with nothing injected."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.cache.disk_tier import DiskTier
from engine.cache.entry import model_tag
from protocol.handoff import KvPayload

TAG = model_tag("model", "")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of its own, 128 KiB in all."""
    root = tmp_path / "disk"
    root.mkdir()
    options = ["-t", "tmpfs", "-o", "size=128k,mode=0700", "tmpfs", str(root)]
    mounted = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.strip()}")
    yield root
    subprocess.run(["umount", str(root)], check=True)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def payload(number: int) -> KvPayload:
    return np.full(10_000, number % 251, np.uint8)


def test_a_full_disk_costs_new_entries_and_keeps_the_old_ones_whole(small_disk: Path) -> None:
    now = [1e9]
    tier = DiskTier(small_disk, 1 << 30, 1e9, lambda: now[0])
    stored = [number for number in range(40) if tier.put("block", key(number), TAG, payload(number))]
    counts = tier.statistics()
    assert 5 <= len(stored) < 13
    assert stored == list(range(len(stored)))
    assert (counts.failures, counts.skipped) == (1, 39 - len(stored))
    assert "No space left on device" in counts.last_error
    assert not list(small_disk.glob("??/*.part")), "half an entry keeps room"
    fresh = DiskTier(small_disk, 1 << 30, 1e9, lambda: now[0])
    for one in (tier, fresh):
        for number in stored:
            assert np.array_equal(one.get("block", key(number), TAG), payload(number))
        assert one.get("block", key(39), TAG) is None
        assert one.statistics().corrupt == 0


def test_it_writes_again_once_there_is_room(small_disk: Path) -> None:
    now = [1e9]
    tier = DiskTier(small_disk, 1 << 30, 1e9, lambda: now[0])
    other = small_disk / "of somebody else"
    with pytest.raises(OSError, match="No space"):
        other.write_bytes(bytes(1 << 20))
    assert not tier.put("block", key(1), TAG, payload(1))
    other.unlink()
    assert not tier.put("block", key(1), TAG, payload(1))
    now[0] += 11
    assert tier.put("block", key(1), TAG, payload(1))
    assert tier.get("block", key(1), TAG) is not None


def test_a_bound_below_the_disk_makes_room_instead(small_disk: Path) -> None:
    tier = DiskTier(small_disk, 50_000, 1e9)
    assert all(tier.put("block", key(number), TAG, payload(number)) for number in range(40))
    assert tier.statistics().failures == 0
    assert tier.statistics().evictions == 36
