"""The disk tier: whatever a crash, a flipped bit, a full disk or another model leaves is a miss at most."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.cache.disk_thread import DiskThread
from engine.cache.disk_tier import DiskTier
from engine.cache.entry import HEADER_BYTES, decode_entry, encode_entry, model_tag
from engine.errors import UnusableTier
from protocol.handoff import KvPayload

KEY, OTHER = b"k" * 16, b"o" * 16
TAG = model_tag("model", "")
PAYLOAD = np.arange(40, dtype=np.uint8)
HOUR_S = 3600.0


def tier_of(root: Path, num_bytes: int = 1 << 20, now_s: Callable[[], float] | None = None) -> DiskTier:
    return DiskTier(root, num_bytes, 72 * HOUR_S, now_s) if now_s else DiskTier(root, num_bytes, 72 * HOUR_S)


def file_of(root: Path) -> Path:
    (path,) = (path for path in root.glob("??/*") if path.is_file())
    return path


def test_an_entry_is_found_again_by_another_process(tmp_path: Path) -> None:
    assert tier_of(tmp_path).put("block", KEY, TAG, PAYLOAD)
    found = tier_of(tmp_path)
    assert np.array_equal(found.get("block", KEY, TAG), PAYLOAD)
    assert found.get("windows", KEY, TAG) is None
    assert found.get("block", OTHER, TAG) is None
    counts = found.statistics()
    assert (counts.entries, counts.hits, counts.misses, counts.corrupt) == (1, 1, 2, 0)


def test_a_file_cut_at_any_byte_is_a_miss_and_goes(tmp_path: Path) -> None:
    whole = encode_entry("block", KEY, TAG, PAYLOAD)
    for length in range(len(whole)):
        root = tmp_path / str(length)
        writer = tier_of(root)
        writer.put("block", KEY, TAG, PAYLOAD)
        file_of(root).write_bytes(whole[:length])
        reader = tier_of(root)
        assert reader.get("block", KEY, TAG) is None, f"cut at {length}"
        assert reader.statistics().corrupt == 1
        assert not list(root.glob("??/*"))
        assert reader.put("block", KEY, TAG, PAYLOAD)
        assert reader.get("block", KEY, TAG) is not None


def test_any_flipped_bit_is_a_miss() -> None:
    whole = encode_entry("block", KEY, TAG, PAYLOAD)
    for index in range(len(whole)):
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[index] ^= 1 << bit
            found = decode_entry("block", KEY, TAG, bytes(flipped))
            assert found is None or index == 7, f"byte {index}"  # byte 7 is padding
    assert decode_entry("block", KEY, TAG, whole + b"\0") is None


def test_an_entry_of_another_key_kind_or_model_is_a_miss() -> None:
    whole = encode_entry("block", KEY, TAG, PAYLOAD)
    assert decode_entry("block", OTHER, TAG, whole) is None
    assert decode_entry("windows", KEY, TAG, whole) is None
    assert decode_entry("block", KEY, model_tag("model", "2"), whole) is None
    assert len(whole) == HEADER_BYTES + PAYLOAD.nbytes


WRITER = """
import sys, numpy as np
from pathlib import Path
from engine.cache.disk_tier import DiskTier
tier = DiskTier(Path(sys.argv[1]), 1 << 30, 1e9)
print("ready", flush=True)
number = 0
while True:
    number += 1
    tier.put("block", number.to_bytes(16, "big"), b"t" * 16, np.full(200_000, number % 251, np.uint8))
"""


@pytest.mark.parametrize("bytes_written", [1, 1_000_000, 5_000_000])
def test_a_writer_that_is_killed_leaves_whole_entries_or_none(tmp_path: Path, bytes_written: int) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        while sum(p.stat().st_size for p in existing(tmp_path)) < bytes_written:
            pass
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    tier = DiskTier(tmp_path, 1 << 30, 1e9)
    entries = tier.statistics().entries
    for number in range(1, entries + 2):
        found = tier.get("block", number.to_bytes(16, "big"), b"t" * 16)
        assert (found is not None) == (number <= entries)
        assert found is None or np.array_equal(found, np.full(200_000, number % 251, np.uint8))
    assert tier.statistics().corrupt == 0


def existing(root: Path) -> list[Path]:
    return [path for path in root.glob("??/*") if path.exists() and not path.name.endswith(".part")]


def test_entries_go_72_hours_after_their_last_use(tmp_path: Path) -> None:
    now = [tmp_path.stat().st_mtime]
    tier = tier_of(tmp_path, now_s=lambda: now[0])
    tier.put("block", KEY, TAG, PAYLOAD)
    tier.put("block", OTHER, TAG, PAYLOAD)
    now[0] += 71 * HOUR_S
    assert tier.get("block", KEY, TAG) is not None
    now[0] += 2 * HOUR_S
    assert tier.get("block", OTHER, TAG) is None
    assert tier.get("block", KEY, TAG) is not None
    tier.put("block", b"x" * 16, TAG, PAYLOAD)
    assert tier.statistics().expired == 1
    assert tier_of(tmp_path, now_s=lambda: now[0] + 73 * HOUR_S).statistics().entries == 0


def test_what_a_killed_writer_left_goes_after_an_hour(tmp_path: Path) -> None:
    (tmp_path / "6b").mkdir()
    part = tmp_path / "6b" / f"{KEY.hex()}.block.1-0.part"
    part.write_bytes(b"half")
    tier_of(tmp_path)
    assert part.exists()  # another process may still write it
    os.utime(part, (1, 1))
    tier_of(tmp_path)
    assert not part.exists()


def test_a_full_disk_is_counted_and_left_alone_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    tier = tier_of(tmp_path, now_s=lambda: now[0])

    def refuse(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", refuse)
        assert not tier.put("block", KEY, TAG, PAYLOAD)
        assert not tier.put("block", OTHER, TAG, PAYLOAD)
    counts = tier.statistics()
    assert (counts.failures, counts.skipped, counts.entries) == (1, 1, 0)
    assert "No space left" in counts.last_error
    now[0] += 11
    assert tier.put("block", KEY, TAG, PAYLOAD)


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnusableTier, match=r"tiers\.disk_path .*file"):
        tier_of(tmp_path / "file")


def test_a_folder_that_turns_read_only_costs_writes_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    thread = DiskThread(tier_of(tmp_path), max_waiting_bytes=1 << 20)
    found: list[KvPayload | None] = []
    try:
        thread.store("block", KEY, TAG, PAYLOAD)
        thread.flush()
        with monkeypatch.context() as read_only:
            read_only.setattr(Path, "write_bytes", refuse)
            read_only.setattr(Path, "unlink", refuse)
            thread.store("block", OTHER, TAG, PAYLOAD)
            thread.load("block", KEY, TAG, found.append)
            thread.flush()
    finally:
        thread.close()
    assert found[0] is not None
    assert thread.statistics().failures == 1
    assert "Read-only" in thread.statistics().last_error


def test_the_thread_outlives_whatever_a_job_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: object) -> KvPayload:
        raise MemoryError("no room")

    def fail(_: KvPayload | None) -> None:
        raise RuntimeError("of whoever waited")

    thread = DiskThread(tier_of(tmp_path), max_waiting_bytes=1 << 20)
    found: list[KvPayload | None] = []
    try:
        thread.store("block", KEY, TAG, PAYLOAD)
        thread.flush()
        with monkeypatch.context() as full:
            full.setattr("engine.cache.disk_tier.decode_entry", out_of_memory)
            full.setattr("engine.cache.disk_tier.encode_entry", out_of_memory)
            thread.load("block", KEY, TAG, found.append)
            thread.store("block", OTHER, TAG, PAYLOAD)
            thread.load("block", KEY, TAG, fail)
            thread.flush()
        thread.load("block", KEY, TAG, found.append)
        thread.flush()
    finally:
        thread.close()
    assert found[0] is None
    assert found[1] is not None
    counts = thread.statistics()
    assert (counts.failures, counts.faults) == (2, 1)  # want of memory, and a fault of whoever waited
    with pytest.raises(AssertionError, match="1 faults"):
        thread.check_integrity()


def test_a_file_that_goes_while_the_folder_is_read_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier_of(tmp_path).put("block", KEY, TAG, PAYLOAD)
    tier_of(tmp_path).put("block", OTHER, TAG, PAYLOAD)
    paths, glob = sorted(tmp_path.glob("??/*")), Path.glob

    def evicting(path: Path, pattern: str) -> list[Path]:
        found = list(glob(path, pattern))
        paths[0].unlink(missing_ok=True)
        return found

    with monkeypatch.context() as other:
        other.setattr(Path, "glob", evicting)
        assert tier_of(tmp_path).statistics().entries == 1


def test_files_of_others_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    strangers = [tmp_path / "my" / "thesis.txt", tmp_path / "my" / "x.part", tmp_path / "6b" / "notes.block"]
    for path in strangers:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(3000))
        os.utime(path, (1, 1))
    (tmp_path / KEY.hex()[:2] / f"{KEY.hex()}.block").mkdir()
    tier = tier_of(tmp_path, num_bytes=2000)
    assert tier.statistics().entries == 0
    assert tier.put("block", OTHER, TAG, PAYLOAD)
    assert all(path.exists() for path in strangers)


keys = st.integers(0, 5).map(lambda number: bytes([number]) * 16)


class DiskMachine(RuleBasedStateMachine):
    """Against a model that knows what was stored, and in which order it was used."""

    SIZE = HEADER_BYTES + 100

    def __init__(self) -> None:
        super().__init__()
        import tempfile

        self.folder = tempfile.TemporaryDirectory()
        self.root = Path(self.folder.name)
        self.now = 1e9
        self.tier = self.opened()
        self.used: dict[bytes, float] = {}  # oldest use first

    def opened(self) -> DiskTier:
        return DiskTier(self.root, 3 * self.SIZE + 10, 100.0, lambda: self.now)

    def payload(self, key: bytes) -> KvPayload:
        return np.frombuffer(key * 6 + key[:4], np.uint8)

    def use(self, key: bytes) -> None:
        self.used.pop(key, None)
        self.used[key] = self.now

    @rule(key=keys)
    def put(self, key: bytes) -> None:
        self.now += 0.001
        fresh = self.now - self.used.get(key, 0.0) <= 100.0
        assert self.tier.put("block", key, TAG, self.payload(key))
        if fresh:
            return
        self.used.pop(key, None)
        self.used = {k: t for k, t in self.used.items() if self.now - t <= 100.0}
        while len(self.used) >= 3:
            self.used.pop(next(iter(self.used)))
        self.use(key)

    @rule(key=keys)
    def get(self, key: bytes) -> None:
        self.now += 0.001
        found = self.tier.get("block", key, TAG)
        known = key in self.used and self.now - self.used[key] <= 100.0
        assert (found is not None) == known
        if known:
            assert np.array_equal(found, self.payload(key))
            self.use(key)

    @rule(key=keys)
    def break_a_file(self, key: bytes) -> None:
        path = self.root / key.hex()[:2] / f"{key.hex()}.block"
        if path.exists() and self.now - self.used.get(key, 0.0) <= 100.0:
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
            os.utime(path, (self.now, self.now))
            assert self.tier.get("block", key, TAG) is None
            self.used.pop(key, None)

    @rule(seconds=st.sampled_from([1.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def books_balance(self) -> None:
        self.tier.check_integrity()
        assert self.tier.statistics().bytes <= 3 * self.SIZE + 10

    def teardown(self) -> None:
        self.folder.cleanup()


TestDiskTier = DiskMachine.TestCase
TestDiskTier.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)


def test_the_thread_answers_loads_and_bounds_what_waits(tmp_path: Path) -> None:
    thread = DiskThread(tier_of(tmp_path), max_waiting_bytes=PAYLOAD.nbytes)
    found: list[KvPayload | None] = []
    try:
        for _ in range(3):
            thread.store("block", KEY, TAG, PAYLOAD)
            thread.flush()
        thread.store("block", OTHER, TAG, np.zeros(PAYLOAD.nbytes + 1, np.uint8))
        thread.load("block", KEY, TAG, found.append)
        thread.load("block", OTHER, TAG, found.append)
        thread.flush()
        assert thread.contains("block", KEY)
        assert not thread.contains("block", OTHER)
        thread.check_integrity()
    finally:
        thread.close()
    assert found[0] is not None
    assert found[1] is None
    assert thread.dropped == 1


def test_one_read_answers_all_who_wait_and_none_is_made_for_nobody(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    tier.put("block", KEY, TAG, PAYLOAD)
    tier.put("block", OTHER, TAG, PAYLOAD)
    thread = DiskThread(tier, max_waiting_bytes=1 << 20)
    found: list[KvPayload | None] = []
    left: list[KvPayload | None] = []
    try:
        with thread._tier_lock:  # the first read waits here
            for _ in range(32):
                thread.load("block", KEY, TAG, found.append)
            for _ in range(3):
                thread.load("block", OTHER, TAG, left.append, lambda: False)
        thread.flush()
        assert thread.statistics().hits == 1
        assert left == [None] * 3
        thread.load("block", OTHER, TAG, left.append)
        thread.flush()
    finally:
        thread.close()
    assert len(found) == 32
    assert all(payload is not None for payload in found)
    assert left[-1] is not None


def test_what_is_stored_without_a_bound_is_all_there_behind_close(tmp_path: Path) -> None:
    thread = DiskThread(tier_of(tmp_path), max_waiting_bytes=PAYLOAD.nbytes)
    for number in range(20):
        thread.store("block", bytes([number]) * 16, TAG, PAYLOAD, bounded=False)
    thread.close()
    assert (thread.dropped, tier_of(tmp_path).statistics().entries) == (0, 20)
