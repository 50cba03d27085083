"""Host memory and disk together: what is kept at the end, and what those who wait for the disk see."""

from pathlib import Path

import numpy as np
import pytest

from engine.cache import tiers as tiers_module
from engine.cache.disk_tier import DiskStatistics, DiskTier
from engine.cache.entry import HEADER_BYTES
from engine.cache.host_tier import HostTier
from engine.cache.prefetch import Prefetch
from engine.cache.tier_config import TierConfig
from engine.cache.tiers import Tiers
from protocol.clock import SystemClock
from protocol.errors import ResourceShortage
from protocol.handoff import KvPayload

SIZE = 1000
PAYLOAD: KvPayload = np.arange(SIZE, dtype=np.uint16).view(np.uint8)[:SIZE]


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def tiers_of(root: Path, **settings: object) -> Tiers:
    config = TierConfig.model_validate({"host_bytes": 1 << 20, "disk_path": str(root), **settings})
    return Tiers(config, SystemClock(), "model", windows_on_disk=False, bytes_of=lambda held: 0)


def statistics_of(tiers: Tiers) -> DiskStatistics:
    found = tiers.statistics().disk
    assert found is not None
    return found


def on_disk(root: Path) -> set[int]:
    return {int(path.name[:32], 16) for path in root.glob("??/*.block")}


def test_write_back_keeps_all_of_host_memory_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers_module, "_WAITING_BYTES", 2 * SIZE)
    tiers = tiers_of(tmp_path, policy="write_back")
    for number in range(300):
        tiers.keep_block(key(number), PAYLOAD)
    assert not on_disk(tmp_path)
    tiers.close()
    assert on_disk(tmp_path) == set(range(300))
    assert tiers.statistics().dropped_writes == 0


def test_a_disk_smaller_than_host_memory_keeps_the_newest(tmp_path: Path) -> None:
    entry = SIZE + HEADER_BYTES
    tiers = tiers_of(tmp_path, policy="write_back", host_bytes=2 << 20, disk_bytes=1 << 20)
    fits = (1 << 20) // entry
    for number in range(fits + 100):
        tiers.keep_block(key(number), PAYLOAD)
    tiers.close()
    assert on_disk(tmp_path) == set(range(100, fits + 100))
    assert statistics_of(tiers).evictions == 0


def test_requests_with_one_prefix_read_it_once_and_those_that_left_not_at_all(tmp_path: Path) -> None:
    writer = tiers_of(tmp_path)
    for number in range(12):
        writer.keep_block(key(number), PAYLOAD)
    writer.close()
    tiers = tiers_of(tmp_path)
    disk = tiers._disk
    assert disk is not None
    with disk._tier_lock:
        waiting = [tiers.prefetch((), [key(number) for number in range(6)]) for _ in range(32)]
        left = tiers.prefetch((), [key(number) for number in range(6, 12)])
        assert left is not None
        tiers.end(left)
    tiers.flush()
    assert statistics_of(tiers).hits == 6
    for prefetch in waiting:
        assert prefetch is not None
        assert (prefetch.done, prefetch.num_pins) == (True, 6)
        tiers.end(prefetch)
    tiers.check_integrity(0)
    tiers.close()


def test_what_is_done_is_pinned() -> None:
    """A step that sees `done` looks for the blocks at once."""
    prefetch = Prefetch(0)

    class Watched(HostTier):
        def pin(self, key: bytes) -> bool:
            assert not prefetch.done
            return super().pin(key)

    tier = Watched(1 << 20, SystemClock())
    prefetch.expect()
    prefetch.arrived(tier, key(1), PAYLOAD)
    assert (prefetch.done, prefetch.num_pins) == (True, 1)


def test_two_workers_share_a_folder_and_keep_one_bound(tmp_path: Path) -> None:
    one, two = (DiskTier(tmp_path, 10 * (SIZE + HEADER_BYTES), 1e9) for _ in range(2))
    for number in range(50):
        (one, two)[number % 2].put("block", key(number), b"t" * 16, PAYLOAD)
        assert len(on_disk(tmp_path)) <= 10
    one.check_integrity()
    two.check_integrity()
    assert on_disk(tmp_path) == set(range(40, 50))


def test_without_a_thread_for_the_disk_there_are_no_tiers(
    tmp_path: Path, shortage: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ResourceShortage, match=r"tiers\.disk_path: there is no thread"):
        tiers_of(tmp_path)
    shortage.undo()
    tiers_of(tmp_path).close()
