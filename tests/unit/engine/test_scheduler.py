"""The scheduler over random loads, without a model: budgets kept, nobody forgotten, all finish."""

import subprocess
import sys
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.block_pool import BlockPool
from engine.cache.keys import block_key
from engine.model.base import Bounds, ResumeRules
from engine.request import Request, Sequence, Stages
from engine.scheduler.scheduler import Chunk, Limits, Scheduler
from protocol.sampling import SamplingParams

BLOCK = 4


@dataclass(frozen=True, slots=True)
class Load:
    """A request that arrives at a step; prompts of one kind share their start."""

    kind: int
    prompt: int
    output: int
    priority: int
    step: int


EXACT = ResumeRules()  # a cached prefix is all that its rows would have left
WINDOWED = ResumeRules(2 * BLOCK, replay=True)  # a window of two blocks runs again behind a longer prefix


def scheduler_of(
    pool: BlockPool, rules: ResumeRules = EXACT, *, limit: int = 4, budget: int = 64, model: str = "model"
) -> Scheduler:
    return Scheduler(pool, rules, Limits(limit, budget), model=model)


@dataclass(slots=True)
class Outcome:
    finished: list[str] = field(default_factory=list)
    steps: int = 0


loads = st.builds(
    Load, kind=st.integers(0, 2), prompt=st.integers(1, 30), output=st.integers(1, 10),
    priority=st.integers(-1, 1), step=st.integers(0, 20),
)  # fmt: skip


def urgency(sequence: Sequence) -> tuple[int, int, str]:
    return (sequence.request.priority, sequence.stages.arrived_ns, sequence.id)


def arrive(number: int, load: Load) -> Sequence:
    ids = tuple(load.kind * 100 + position // 8 for position in range(load.prompt))
    request = Request(f"r{number}", ids, SamplingParams(max_tokens=load.output), load.priority)
    return Sequence(request, list(ids), len(ids), stages=Stages(arrived_ns=load.step))


def check_step(
    scheduler: Scheduler, chunks: list[Chunk], before: set[str], *, budget: int, limit: int
) -> None:
    names = [chunk.sequence.id for chunk in chunks]
    assert len(set(names)) == len(names), "a sequence has two chunks in one step"
    assert sum(chunk.count for chunk in chunks) <= budget
    assert len(scheduler.running) <= limit
    for chunk in chunks:
        assert chunk.count >= 1
        assert len(chunk.sequence.blocks) * BLOCK >= chunk.sequence.num_computed + chunk.count
    admitted = [s for s in scheduler.running if s.id not in before]
    assert all(urgency(s) < urgency(w) for s in admitted for w in scheduler.waiting), "somebody overtook"
    decoding = [s for s in scheduler.running if s.num_missing == 1 and s.id in before]
    if budget >= len(decoding):
        assert {s.id for s in decoding} <= set(names), "a decoding sequence was skipped"


def run(scheduler: Scheduler, loads: list[Load], *, budget: int, limit: int) -> Outcome:
    coming = [(load.step, arrive(number, load)) for number, load in enumerate(loads)]
    outcome = Outcome()
    bound = 40 + sum(load.prompt + load.output for load in loads) * (1 + len(loads))
    while coming or scheduler.waiting or scheduler.running:
        for entry in [c for c in coming if c[0] <= outcome.steps]:
            coming.remove(entry)
            scheduler.add(entry[1])
        before = {s.id for s in scheduler.running}
        chunks = scheduler.schedule().chunks
        assert chunks or not (scheduler.waiting or scheduler.running), "there is work, and none was scheduled"
        check_step(scheduler, chunks, before, budget=budget, limit=limit)
        for chunk in chunks:
            compute(scheduler, chunk, outcome)
        scheduler.check_integrity()
        outcome.steps += 1
        assert outcome.steps < bound, "it does not end"
    return outcome


def compute(scheduler: Scheduler, chunk: Chunk, outcome: Outcome) -> None:
    sequence, completes = chunk.sequence, chunk.completes
    scheduler.computed(chunk)
    if not completes:
        return
    sequence.token_ids.append(len(sequence.token_ids))
    if sequence.num_generated == sequence.request.sampling.max_tokens:
        scheduler.remove(sequence)
        outcome.finished.append(sequence.id)


@settings(max_examples=150, deadline=None)
@given(
    loads=st.lists(loads, min_size=1, max_size=8),
    num_blocks=st.integers(10, 24),
    budget=st.integers(1, 40),
    limit=st.integers(1, 6),
    rules=st.sampled_from([EXACT, WINDOWED]),
)
def test_all_finish_within_the_budget_and_in_order(
    loads: list[Load], num_blocks: int, budget: int, limit: int, rules: ResumeRules
) -> None:
    pool = BlockPool(num_blocks, BLOCK)
    scheduler = scheduler_of(pool, rules, limit=limit, budget=budget)
    outcome = run(scheduler, loads, budget=budget, limit=limit)
    assert sorted(outcome.finished) == sorted(f"r{n}" for n in range(len(loads)))
    assert pool.statistics().held == 0


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=2, max_size=6), budget=st.integers(1, 30))
def test_equal_requests_finish_in_order_of_arrival(lengths: list[int], budget: int) -> None:
    loads = [Load(0, max(lengths), 5, 0, step) for step in range(len(lengths))]
    scheduler = scheduler_of(BlockPool(12, BLOCK), budget=budget)
    assert run(scheduler, loads, budget=budget, limit=4).finished == [f"r{n}" for n in range(len(loads))]


def test_a_prompt_known_to_the_cache_starts_behind_it() -> None:
    scheduler = scheduler_of(BlockPool(20, BLOCK))
    run(scheduler, [Load(0, 18, 1, 0, 0)], budget=64, limit=4)
    again = arrive(1, Load(0, 18, 1, 0, 0))
    scheduler.add(again)
    (chunk,) = scheduler.schedule().chunks
    assert (again.num_cached, chunk.count) == (16, 2)
    scheduler.remove(again)
    scheduler.check_integrity()


def test_another_model_shares_no_prefix() -> None:
    pool = BlockPool(20, BLOCK)
    run(
        scheduler_of(pool, model="one"),
        [Load(0, 18, 1, 0, 0)],
        budget=64,
        limit=4,
    )
    other = scheduler_of(pool, model="two")
    other.add(sequence := arrive(1, Load(0, 18, 1, 0, 0)))
    other.schedule()
    assert sequence.num_cached == 0


def test_one_who_waits_for_blocks_is_hashed_once_and_disturbs_no_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashed: list[int] = []

    def counting(previous: bytes, ids: list[int], *rest: object, **named: bool) -> bytes:
        hashed.append(len(ids))
        return block_key(previous, ids)

    monkeypatch.setattr("engine.scheduler.prefix.block_key", counting)
    pool = BlockPool(9, BLOCK)
    scheduler = scheduler_of(pool)
    first, other = arrive(0, Load(1, 8, 4, 0, 0)), arrive(1, Load(2, 8, 4, 0, 0))
    for sequence in (first, other):  # leave two cached blocks each, the first one's older
        scheduler.add(sequence)
        for chunk in scheduler.schedule().chunks:
            scheduler.computed(chunk)
        scheduler.remove(sequence)
    holder = arrive(2, Load(3, 17, 4, 0, 0))
    scheduler.add(holder)
    assert [chunk.sequence for chunk in scheduler.schedule().chunks] == [holder]
    blocked = arrive(3, Load(1, 30, 4, 0, 0))
    scheduler.add(blocked)
    hashed.clear()
    order = list(pool._cached)
    for _ in range(50):
        scheduler.schedule()
        assert list(pool._cached) == order
    assert list(scheduler.waiting) == [blocked]
    assert len(hashed) == 3  # two known blocks, and the first that is not
    scheduler.check_integrity()
    scheduler.remove(holder)
    scheduler.schedule()
    assert scheduler.running == [blocked]
    assert blocked.num_computed == 8


def test_one_preempted_behind_a_prefix_goes_on_behind_the_same_one() -> None:
    """Its own blocks are known by then, and would be a longer prefix: other rows, and so other bits."""
    pool = BlockPool(20, BLOCK)
    scheduler = scheduler_of(pool, WINDOWED, budget=64)
    run(scheduler, [Load(0, 13, 1, 0, 0)], budget=64, limit=4)
    sequence = arrive(1, Load(0, 30, 4, 0, 0))
    scheduler.add(sequence)
    (chunk,) = scheduler.schedule().chunks
    assert sequence.row_bounds == Bounds(4, 12, 4)
    assert (sequence.num_computed, chunk.count, sequence.num_cached) == (4, 26, 12)
    scheduler.computed(chunk)
    scheduler._preempt(sequence)
    (chunk,) = scheduler.schedule().chunks
    assert sequence.row_bounds == Bounds(4, 28, 4)  # its rows; the entries that they left are known
    assert (sequence.num_computed, chunk.count, sequence.rebuilding) == (4, 26, False)


def test_entries_that_are_gone_are_computed_anew_before_their_window() -> None:
    pool = BlockPool(8, BLOCK)
    scheduler = scheduler_of(pool, WINDOWED, budget=8)
    run(scheduler, [Load(0, 13, 1, 0, 0)], budget=64, limit=4)
    sequence = arrive(1, Load(0, 30, 4, 0, 0))
    scheduler.add(sequence)
    assert scheduler.schedule().chunks
    bounds = sequence.row_bounds
    scheduler._preempt(sequence)
    other = arrive(2, Load(2, 30, 1, -1, 0))  # takes every block, so that nothing stays known
    scheduler.add(other)
    for _ in range(4):
        for chunk in scheduler.schedule().chunks:
            scheduler.computed(chunk)
    scheduler.remove(other)
    rows: list[tuple[bool, int, int, Bounds]] = []
    while sequence.num_missing or not rows:
        (chunk,) = scheduler.schedule().chunks
        start = sequence.num_computed
        rows.append((sequence.rebuilding, start, start + chunk.count, sequence.row_bounds))
        scheduler.computed(chunk)
        scheduler.check_integrity()
    encoder = Bounds(decoder_from=12)
    assert rows == [
        (True, 0, 8, encoder), (True, 8, 12, encoder),
        (False, 4, 12, bounds), (False, 12, 20, bounds), (False, 20, 28, bounds), (False, 28, 30, bounds),
    ]  # fmt: skip
    assert sequence.num_cached == 12


def test_scheduling_loads_no_torch() -> None:
    code = "import sys, engine.scheduler.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
