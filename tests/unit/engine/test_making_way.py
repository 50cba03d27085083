"""Whose place an urgent request takes: as many as it needs, and nobody's where all of them are too few."""

from copy import deepcopy
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.block_pool import BlockPool
from engine.model.base import ResumeRules
from engine.request import Request, Sequence, Stages
from engine.scheduler.admission import plan_admission
from engine.scheduler.kept import NothingKept
from engine.scheduler.scheduler import Limits, Plan, Scheduler
from protocol.sampling import SamplingParams

BLOCK, RULES = 4, ResumeRules()


def scheduler_of(num_blocks: int, limit: int = 6) -> Scheduler:
    return Scheduler(BlockPool(num_blocks, BLOCK), RULES, Limits(limit, 256), model="m")


def arrive(name: str, ids: tuple[int, ...], priority: int, at: int = 0) -> Sequence:
    request = Request(name, ids, SamplingParams(max_tokens=8), priority)
    return Sequence(request, list(ids), len(ids), stages=Stages(arrived_ns=at))


def compute(scheduler: Scheduler, plan: Plan) -> None:
    for chunk in plan.chunks:
        completes = chunk.completes
        scheduler.computed(chunk)
        if completes:
            chunk.sequence.token_ids.append(7)
    scheduler.check_integrity()


def test_blocks_that_two_victims_share_are_room() -> None:
    scheduler = scheduler_of(12)
    parent = arrive("low", tuple(range(40)), 5)
    scheduler.add(parent)
    compute(scheduler, scheduler.schedule())
    assert scheduler.fork(parent, parent.fork(1))
    scheduler.add(head := arrive("urgent", tuple(range(100, 116)), -5))
    compute(scheduler, scheduler.schedule())
    assert head in scheduler.running
    assert scheduler.statistics().preemptions >= 1


def test_known_blocks_of_the_urgent_one_are_no_room_for_its_others() -> None:
    """Both its known blocks and those that it needs beside them would be the victim's."""
    scheduler = scheduler_of(12)
    peer, low = arrive("peer", tuple(range(200, 212)), 0), arrive("low", tuple(range(27)), 5)
    for sequence in (peer, low):
        scheduler.add(sequence)
    compute(scheduler, scheduler.schedule())
    scheduler.add(head := arrive("urgent", (*range(20), *range(300, 317)), 0, at=1))
    before = scheduler.statistics().preemptions
    compute(scheduler, scheduler.schedule(1))
    assert (scheduler.statistics().preemptions, head in scheduler.running) == (before, False)
    assert low in scheduler.running


@dataclass(frozen=True, slots=True)
class Prompt:
    kind: int
    length: int
    priority: int
    forks: int


prompts = st.builds(
    Prompt, st.integers(0, 1), st.integers(1, 30), st.integers(-1, 2), st.integers(0, 2)
)  # fmt: skip


def ids_of(prompt: Prompt) -> tuple[int, ...]:
    """Prompts of one kind share their start, and differ behind a length of their own."""
    shared = min(prompt.length, 12)
    rest = range(1000 * prompt.length, 1000 * prompt.length + prompt.length - shared)
    return (*(prompt.kind * 100 + position for position in range(shared)), *rest)


def fewest(scheduler: Scheduler, head: Sequence) -> int | None:
    """How many of those that may give way, the least urgent first, make room: found by trying."""
    lower = scheduler._lower(head)
    for count in range(len(lower) + 1):
        tried, sequence = deepcopy((scheduler, head))
        tried._pool.on_evict = None
        for victim in tried._lower(sequence)[:count]:
            tried._preempt(victim)
        plan = plan_admission(sequence, tried._root(sequence), tried._pool, RULES, NothingKept())
        if tried._slots and tried._pool.num_available - _taken(tried._pool, plan.known) >= plan.num_needed:
            return count
    return None


def _taken(pool: BlockPool, known: tuple[tuple[bytes, object], ...]) -> int:
    before = pool.num_available
    held = [pool.match([key])[0] for key, _ in known]
    taken = before - pool.num_available
    pool.release(held)
    return taken


@settings(max_examples=150, deadline=None)
@given(st.lists(prompts, min_size=1, max_size=4), prompts, st.integers(8, 20), st.integers(2, 6))
def test_as_many_give_way_as_it_takes_and_nobody_in_vain(
    running: list[Prompt], urgent: Prompt, num_blocks: int, limit: int
) -> None:
    scheduler = scheduler_of(num_blocks, limit)
    for number, prompt in enumerate(running):
        scheduler.add(sequence := arrive(f"r{number}", ids_of(prompt), prompt.priority, number))
        compute(scheduler, scheduler.schedule(number))
        for fork in range(prompt.forks if sequence in scheduler.running else 0):
            if scheduler.runs_fork(sequence):
                scheduler.fork(sequence, sequence.fork(fork + 1))
    for sequence in list(scheduler.waiting):
        scheduler.remove(sequence)
    head = arrive("head", ids_of(urgent), -2, 99)
    scheduler.add(head)
    expected, before = fewest(scheduler, head), scheduler.statistics().preemptions
    admitted = scheduler._admit(head)
    scheduler.check_integrity()
    assert admitted == (expected is not None)
    assert scheduler.statistics().preemptions - before == (expected or 0)
