"""Processes that share a folder know alike what it holds, and keep its bound together."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hand_clock import HandClock
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.cache.disk_thread import DiskThread
from engine.cache.disk_tier import DiskTier
from engine.cache.entry import HEADER_BYTES, model_tag
from engine.cache.folder_index import FolderIndex
from protocol.handoff import KvPayload

TAG = model_tag("model", "")
SIZE = 100
ENTRY = SIZE + HEADER_BYTES


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def payload(number: int) -> KvPayload:
    return np.full(SIZE, number % 251, np.uint8)


def tier_of(root: Path, entries: int = 10, now_s: Callable[[], float] | None = None) -> DiskTier:
    clock = {} if now_s is None else {"now_s": now_s}
    return DiskTier(root, entries * ENTRY, 1e9, **clock)


def sizes(root: Path) -> dict[str, int]:
    """Of whole entries."""
    found: dict[str, int] = {}
    for path in root.glob("??/*"):
        if not path.name.endswith(".part"):
            try:
                found[path.name] = path.stat().st_size
            except FileNotFoundError:
                continue
    return found


def test_an_entry_that_came_again_keeps_what_is_known_of_it_since(tmp_path: Path) -> None:
    """Its own records were read back, and with them the time at which it had come."""
    now_s = 1e9
    tier = DiskTier(tmp_path, 10 * ENTRY, 100.0, lambda: now_s)
    tier.put("block", key(2), TAG, payload(2))
    now_s += 120
    tier.put("block", key(2), TAG, payload(2))  # too old: it goes, and comes again
    now_s += 60
    assert tier.get("block", key(2), TAG) is not None
    tier.put("block", key(3), TAG, payload(3))
    now_s += 60
    assert tier.get("block", key(2), TAG) is not None


WRITER = """
import sys, numpy as np
from pathlib import Path
from engine.cache.disk_tier import DiskTier
root, first = Path(sys.argv[1]), int(sys.argv[2])
tier = DiskTier(root, 40 * 10_064, 1e9)
print("ready", flush=True)
for number in range(first, first + 400):
    tier.put("block", number.to_bytes(16, "big"), b"t" * 16, np.full(10_000, number % 251, np.uint8))
    tier.get("block", max(number - 3, 0).to_bytes(16, "big"), b"t" * 16)
print(tier.statistics().stored, tier.statistics().last_error or "-", flush=True)
"""


def test_processes_that_write_at_once_keep_one_bound(tmp_path: Path) -> None:
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(1000 * number)],
            stdout=subprocess.PIPE, text=True,
        )
        for number in range(3)
    ]  # fmt: skip
    most = 0
    while any(writer.poll() is None for writer in writers):
        most = max(most, sum(sizes(tmp_path).values()))
    told = [writer.communicate()[0].split(maxsplit=2) for writer in writers]
    # A listing is no moment: an entry may be seen that goes, and then the one that comes for it, by each.
    assert 0 < most <= (40 + len(writers)) * 10_064
    assert sum(sizes(tmp_path).values()) <= 40 * 10_064
    for _, stored, error in told:
        assert int(stored) > 0  # on a busy machine many writes are given up for want of the lock
        assert error == "-\n"
    assert sizes(tmp_path).keys() == DiskTier(tmp_path, 1 << 30, 1e9)._index.files.keys()


def test_what_one_has_written_and_removed_the_other_knows_when_it_looks(tmp_path: Path) -> None:
    one, other = tier_of(tmp_path, 2), tier_of(tmp_path, 2)
    one.put("block", key(1), TAG, payload(1))
    assert not other.seems_there("block", key(1))
    other.read_news()
    assert other.seems_there("block", key(1))
    assert np.array_equal(other.get("block", key(1), TAG), payload(1))
    for number in (2, 3):
        other.put("block", key(number), TAG, payload(number))
    one.read_news()
    assert [one.seems_there("block", key(number)) for number in (1, 2, 3)] == [False, True, True]
    assert one.statistics().bytes == 2 * ENTRY


def test_the_thread_looks_for_news_when_somebody_has_missed_something(tmp_path: Path) -> None:
    thread = DiskThread(tier_of(tmp_path), max_waiting_bytes=1 << 20)
    try:
        thread.flush()
        tier_of(tmp_path).put("block", key(1), TAG, payload(1))
        assert not thread.contains("block", key(1))
        thread.flush()
        assert thread.contains("block", key(1))
    finally:
        thread.close()


def test_news_is_looked_for_twice_a_second_at_most(tmp_path: Path) -> None:
    clock = HandClock()
    thread = DiskThread(tier_of(tmp_path), 1 << 20, clock)
    other = tier_of(tmp_path)

    def finds(number: int) -> bool:
        """By the second time that it is asked for."""
        other.put("block", key(number), TAG, payload(number))
        assert not thread.contains("block", key(number))
        thread.flush()
        return thread.contains("block", key(number))

    try:
        thread.flush()
        assert finds(1)
        clock.now += 499_999_999
        assert not finds(2)
        clock.now += 1
        assert finds(3)
        assert thread.contains("block", key(2))
    finally:
        thread.close()


def test_a_look_asks_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = tier_of(tmp_path)
    tier.put("block", key(1), TAG, payload(1))

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the disk was asked")

    with monkeypatch.context() as disk:
        for owner, name in ((os, "open"), (os, "stat"), (os, "pread"), (Path, "stat"), (Path, "exists")):
            disk.setattr(owner, name, refuse)
        found = [tier.seems_there("block", key(number)) for number in (1, 2)]
    assert found == [True, False]


def test_what_another_process_uses_goes_after_what_nobody_uses(tmp_path: Path) -> None:
    now = [100.0]
    one, other = (tier_of(tmp_path, 3, lambda: now[0]) for _ in range(2))
    for number in range(3):
        now[0] += 1
        one.put("block", key(number), TAG, payload(number))
    now[0] += 1
    other.read_news()
    assert other.get("block", key(0), TAG) is not None
    now[0] += 1
    one.put("block", key(3), TAG, payload(3))
    assert [one.seems_there("block", key(number)) for number in range(4)] == [True, False, True, True]


def test_a_lock_that_is_not_to_be_had_costs_writes_and_no_reads(tmp_path: Path) -> None:
    now = [100.0]
    tier = tier_of(tmp_path, now_s=lambda: now[0])
    tier.put("block", key(1), TAG, payload(1))
    with (tmp_path / "index.lock").open("rb") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        assert not tier.put("block", key(2), TAG, payload(2))
        assert not tier.put("block", key(3), TAG, payload(3))
        assert tier.get("block", key(1), TAG) is not None
        late = tier_of(tmp_path, now_s=lambda: now[0])
        assert late.seems_there("block", key(1))
    assert (tier.statistics().skipped, tier.statistics().failures) == (2, 0)
    now[0] += 2
    assert tier.put("block", key(2), TAG, payload(2))


def test_a_log_that_is_damaged_or_gone_is_made_again_from_the_folder(tmp_path: Path) -> None:
    writer = tier_of(tmp_path)
    for number in range(5):
        writer.put("block", key(number), TAG, payload(number))
    log = tmp_path / "index.log"
    for damaged in (log.read_bytes()[:200], bytes(1000), b"", None):
        log.unlink(missing_ok=True)
        if damaged is not None:
            log.write_bytes(damaged)
        tier = tier_of(tmp_path)
        assert all(tier.get("block", key(number), TAG) is not None for number in range(5))
        assert tier.statistics().bytes == 5 * ENTRY


def test_processes_whose_folder_is_cleared_keep_one_bound_again(tmp_path: Path) -> None:
    """Without a log each kept the bound for itself, to the end of its life, and neither saw the other."""
    one, other = tier_of(tmp_path), tier_of(tmp_path)
    one.put("block", key(0), TAG, payload(0))
    for left in tmp_path.iterdir():
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    for number in range(1, 20):
        for tier in (one, other):
            tier.put("block", key(100 * number + (tier is one)), TAG, payload(number))
            assert sum(sizes(tmp_path).values()) <= 10 * ENTRY
    assert (tmp_path / "index.log").exists()
    one.read_news()
    assert one.get("block", key(1900), TAG) is not None  # of the other
    assert one.statistics().bytes == other.statistics().bytes == 10 * ENTRY
    for tier in (one, other):
        assert tier.statistics().failures == 0
        tier.check_integrity()


@pytest.mark.parametrize("gone", ["index.log", "*"])
def test_a_folder_that_is_cleared_between_two_writes_is_logged_anew(tmp_path: Path, gone: str) -> None:
    one = tier_of(tmp_path)
    for number in range(4):
        one.put("block", key(number), TAG, payload(number))
    for left in tmp_path.glob(gone):
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    one.put("block", key(9), TAG, payload(9))
    expected = 1 if gone == "*" else 5
    assert tier_of(tmp_path).statistics().entries == one.statistics().entries == expected


def test_a_damaged_record_is_passed_over(tmp_path: Path) -> None:
    writer, reader = FolderIndex(tmp_path), FolderIndex(tmp_path)
    writer.read_folder(0.0)
    with writer.locked(0.0):
        for number in range(3):
            writer.add(f"{key(number).hex()}.block", 10, 1.0)
    data = bytearray((tmp_path / "index.log").read_bytes())
    data[2 * 64 + 20] ^= 1
    (tmp_path / "index.log").write_bytes(data + b"half a record")
    reader.catch_up()
    assert list(reader.files) == [f"{key(number).hex()}.block" for number in (0, 2)]


def test_a_log_does_not_grow_with_what_has_come_and_gone(tmp_path: Path) -> None:
    one, other = tier_of(tmp_path, 4), tier_of(tmp_path, 4)
    for number in range(1500):
        one.put("block", key(number), TAG, payload(number))
    assert (tmp_path / "index.log").stat().st_size < 64 * 1100
    other.read_news()
    assert other._index.files.keys() == one._index.files.keys() == sizes(tmp_path).keys()


def test_a_process_that_is_killed_between_file_and_log_leaves_nothing_uncounted(tmp_path: Path) -> None:
    tier_of(tmp_path).put("block", key(1), TAG, payload(1))
    path = tmp_path / "00" / f"{key(2).hex()}.block"
    path.write_bytes(next(tmp_path.glob("00/*.block")).read_bytes())
    os.utime(path, (1e9, 1e9))
    tier = tier_of(tmp_path, 2)
    assert tier.statistics().bytes == 2 * ENTRY
    tier.put("block", key(3), TAG, payload(3))
    assert not path.exists()


def test_a_folder_is_read_in_the_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier_of(tmp_path).put("block", key(1), TAG, payload(1))
    go_on, names = threading.Event(), list[str]()
    read = FolderIndex.read_folder

    def slow(index: FolderIndex, now_s: float) -> None:
        names.append(threading.current_thread().name)
        go_on.wait(60)
        read(index, now_s)

    monkeypatch.setattr(FolderIndex, "read_folder", slow)
    tier = DiskTier(tmp_path, 10 * ENTRY, 1e9, reads_at_once=False)
    thread = DiskThread(tier, max_waiting_bytes=1 << 20)
    calls: list[bool] = []
    try:
        thread.when_read(lambda: calls.append(thread.contains("block", key(1))))
        assert not thread.is_read
        assert not thread.contains("block", key(1))
        go_on.set()
        thread.flush()
        assert thread.is_read
        thread.when_read(lambda: calls.append(True))
    finally:
        go_on.set()
        thread.close()
    assert calls == [True, True]
    assert names == ["kv-disk"]


class FolderMachine(RuleBasedStateMachine):
    """Two processes' tiers over one folder, against what lies in it."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.root = Path(self.folder.name)
        self.now = 1e9
        self.tiers = [self.opened(), self.opened()]

    def opened(self) -> DiskTier:
        return DiskTier(self.root, 4 * ENTRY + 10, 200.0, lambda: self.now)

    @rule(which=st.integers(0, 1), number=st.integers(0, 7))
    def put(self, which: int, number: int) -> None:
        self.now += 0.01
        assert self.tiers[which].put("block", key(number), TAG, payload(number))

    @rule(which=st.integers(0, 1), number=st.integers(0, 7))
    def get(self, which: int, number: int) -> None:
        self.now += 0.01
        found = self.tiers[which].get("block", key(number), TAG)
        assert found is None or np.array_equal(found, payload(number))

    @rule(which=st.integers(0, 1))
    def begin_again(self, which: int) -> None:
        self.tiers[which] = self.opened()

    @rule(number=st.integers(0, 7))
    def somebody_removes_a_file(self, number: int) -> None:
        (self.root / "00" / f"{key(number).hex()}.block").unlink(missing_ok=True)

    @rule(seconds=st.sampled_from([1.0, 150.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def the_bound_is_kept_by_both_together(self) -> None:
        assert sum(sizes(self.root).values()) <= 4 * ENTRY + 10

    @invariant()
    def nothing_that_lies_there_is_unknown(self) -> None:
        for tier in self.tiers:
            tier.read_news()
            tier.check_integrity()
            assert sizes(self.root).keys() <= tier._index.files.keys()

    def teardown(self) -> None:
        self.folder.cleanup()


TestFolder = FolderMachine.TestCase
TestFolder.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
