"""Who waits for the disk does so once, and who waits for blocks counts its hits and misses once."""

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_runs import drain, finish, small_engine
from hand_clock import HandClock
from tiny_gguf import TOKENS

from engine import Engine, Request, SamplingParams
from engine.cache.folder_index import FolderIndex

NEW = SamplingParams(max_tokens=6, ignore_eos=True)
PROMPT = tuple(random.Random(4).choices(range(3, len(TOKENS)), k=100))
SECOND_NS = 1_000_000_000


Make = Callable[[], tuple[Engine, HandClock, threading.Event]]


@pytest.fixture
def make(
    tiny_model: Path, cpu_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Make]:
    """An engine over a folder with PROMPT's blocks, which is read when the event is set."""
    tiers = {"host_bytes": 8 << 20, "disk_path": str(tmp_path), "load_timeout_s": 1.0}
    first = small_engine(tiny_model, tiers=tiers)
    finish(first, [Request("r", PROMPT, NEW)])
    first.close()
    made: list[Engine] = []
    go_on, read = threading.Event(), FolderIndex.read_folder

    def slow(index: FolderIndex, now_s: float) -> None:
        go_on.wait(60)
        read(index, now_s)

    def engine() -> tuple[Engine, HandClock, threading.Event]:
        monkeypatch.setattr(FolderIndex, "read_folder", slow)
        clock = HandClock(SECOND_NS)
        made.append(
            Engine(small_engine(tiny_model).config.model_copy(update=_tiers(tiny_model, tiers)), clock)
        )
        return made[-1], clock, go_on

    yield engine
    go_on.set()
    for one in made:
        one.close()


def _tiers(model: Path, tiers: dict[str, object]) -> dict[str, object]:
    return {"tiers": type(small_engine(model).config.tiers).model_validate(tiers)}


def test_the_folder_and_its_entries_are_waited_for_together(make: Make) -> None:
    engine, clock, go_on = make()
    disk = engine._residence.tiers._disk
    assert disk is not None
    engine.add(Request("r", PROMPT, NEW))
    clock.now += SECOND_NS * 9 // 10
    assert engine.step().num_rows == 0
    go_on.set()
    disk.flush()
    with disk._tier_lock:  # the entry takes its time too
        assert engine.step().num_rows == 0
        assert engine.statistics().loading == 1
        clock.now += SECOND_NS * 2 // 10
        assert engine.step().num_rows > 0
    drain(engine)


def test_those_that_wait_stay_in_order_of_their_deadlines(make: Make) -> None:
    engine, clock, go_on = make()
    disk = engine._residence.tiers._disk
    assert disk is not None
    engine.add(Request("early", PROMPT, NEW))
    clock.now += SECOND_NS // 2
    go_on.set()
    disk.flush()
    with disk._tier_lock:
        engine.add(Request("late", PROMPT, NEW))
        engine.step()
        waiting = engine._loading.waiting
        assert [sequence.id for sequence in waiting] == ["early", "late"]
        deadlines = [prefetch.deadline_ns for prefetch in waiting.values()]
        assert deadlines == [2 * SECOND_NS, 5 * SECOND_NS // 2]
        clock.now = deadlines[0] + 1
        engine.step()
        assert [sequence.id for sequence in waiting] == ["late"]
    outputs, _ = drain(engine)
    assert outputs["early"][-5:] == outputs["late"][-5:]


def test_who_waits_for_blocks_counts_its_misses_once(tiny_model: Path, cpu_library: Path) -> None:
    engine = small_engine(tiny_model, tiers={"host_bytes": 8 << 20})
    finish(engine, [Request("before", PROMPT[:40], NEW)])
    engine.pool.release(engine.pool.allocate(engine.pool.num_available))  # what it left is in host memory
    taken = engine.pool.allocate(engine.pool.num_available - 2)
    engine.add(Request("r", PROMPT, NEW))
    counts: set[tuple[int, int]] = set()
    for _ in range(5):
        assert engine.step().num_rows == 0
        kept = engine.statistics().tiers.blocks
        counts.add((kept.hits, kept.misses))
    assert len(counts) == 1
    engine.pool.release(taken)
    finish(engine)
    kept = engine.statistics().tiers.blocks
    assert (kept.hits, kept.misses) == counts.pop()
    assert (kept.hits, kept.misses) == (2, 2)  # one miss of each request, at its third and first block
