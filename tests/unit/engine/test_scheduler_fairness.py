"""Who goes first, who gives way, and that nobody waits for ever: the scheduler under a clock of its own."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.cache.block_pool import BlockPool
from engine.model.base import ResumeRules
from engine.request import Request, Sequence, Stages
from engine.scheduler.scheduler import Limits, Plan, Scheduler
from protocol.sampling import SamplingParams

BLOCK, STARVATION = 4, 50
WINDOWED = ResumeRules(2 * BLOCK, replay=True)


def arrive(
    name: str, length: int = 8, *, priority: int = 0, at: int = 0, slack_ms: float = 0.0, output: int = 4
) -> Sequence:
    ids = tuple(hash_free(name) + position for position in range(length))
    request = Request(name, ids, SamplingParams(max_tokens=output), priority, slack_ms)
    return Sequence(request, list(ids), len(ids), stages=Stages(arrived_ns=at))


def hash_free(name: str) -> int:
    return int.from_bytes(name.encode()[-3:], "big")


def finish_step(scheduler: Scheduler, plan: Plan) -> list[str]:
    """Compute a plan; the names of those that have ended."""
    ended: list[str] = []
    for chunk in plan.chunks:
        sequence, completes = chunk.sequence, chunk.completes
        scheduler.computed(chunk)
        if completes:
            sequence.token_ids.append(sequence.num_generated)
            if sequence.num_generated == sequence.request.sampling.max_tokens:
                scheduler.remove(sequence)
                ended.append(sequence.id)
    scheduler.check_integrity()
    return ended


def order_of(scheduler: Scheduler, sequences: list[Sequence], now: int = 0) -> list[str]:
    for sequence in sequences:
        scheduler.add(sequence)
    ended: list[str] = []
    while scheduler.waiting or scheduler.running:
        ended += finish_step(scheduler, scheduler.schedule(now))
    return ended


def one_at_a_time(starvation: int = 1 << 60) -> Scheduler:
    pool = BlockPool(40, BLOCK)
    return Scheduler(pool, ResumeRules(), Limits(1, 64, starvation), model="m")


def test_a_call_with_slack_lets_those_without_go_first() -> None:
    calls = [arrive("slack", slack_ms=5.0), arrive("tight", at=10), arrive("more", at=20, slack_ms=9.0)]
    assert order_of(one_at_a_time(), calls) == ["tight", "slack", "more"]


def test_slack_does_not_outweigh_priority() -> None:
    calls = [arrive("low", priority=1), arrive("high", slack_ms=5.0)]
    assert order_of(one_at_a_time(), calls) == ["high", "low"]


def test_one_left_waiting_too_long_goes_before_every_priority_and_keeps_its_place() -> None:
    scheduler = one_at_a_time(STARVATION)
    scheduler.add(arrive("old", priority=9))
    scheduler.add(arrive("urgent", priority=-9, at=100))
    (chunk,) = scheduler.schedule(now_ns=101).chunks
    assert chunk.sequence.id == "old"
    finish_step(scheduler, Plan([chunk]))
    (chunk,) = scheduler.schedule(now_ns=102).chunks  # served just now, it gives way again
    assert chunk.sequence.id == "urgent"
    assert scheduler.statistics().preemptions == 1
    finish_step(scheduler, Plan([chunk]))


def test_equal_priorities_never_take_each_others_place() -> None:
    scheduler = one_at_a_time()
    scheduler.add(arrive("first", at=10))
    finish_step(scheduler, scheduler.schedule(now_ns=10))
    scheduler.add(arrive("earlier", at=1))
    assert [chunk.sequence.id for chunk in scheduler.schedule(now_ns=11).chunks] == ["first"]


def test_nobody_is_preempted_for_one_who_would_not_fit_even_so() -> None:
    scheduler = Scheduler(BlockPool(12, BLOCK), ResumeRules(), Limits(4, 64), model="m")
    for name, priority in (("middle", 0), ("low", 5)):
        scheduler.add(arrive(name, 20, priority=priority))
    finish_step(scheduler, scheduler.schedule())
    scheduler.add(arrive("high", 40, priority=0, at=1))
    finish_step(scheduler, scheduler.schedule())
    assert scheduler.statistics().preemptions == 0


def test_a_prefix_that_the_victim_held_is_not_counted_as_room() -> None:
    """It is free once the victim is gone, and then the very blocks that the urgent one shares."""
    pool = BlockPool(10, BLOCK)
    scheduler = Scheduler(pool, ResumeRules(), Limits(4, 64), model="m")
    ids = tuple(range(100, 132))
    other = arrive("other", 9, priority=-1)
    victim = Sequence(Request("victim", ids[:17], SamplingParams(max_tokens=4), 5), list(ids[:17]), 17)
    for sequence in (other, victim):
        scheduler.add(sequence)
    finish_step(scheduler, scheduler.schedule())
    assert pool.num_available == 2
    head = Sequence(Request("head", ids, SamplingParams(max_tokens=1), 0), list(ids), 32)
    scheduler.add(head)
    ended: list[str] = []
    while scheduler.waiting or scheduler.running:
        ended += finish_step(scheduler, scheduler.schedule())
    assert ended == ["other", "victim", "head"]
    assert scheduler.statistics().preemptions == 0  # it would not have fitted beside the other even so


def test_a_long_prompt_gets_rows_beside_an_endless_stream_of_others() -> None:
    """A suspended prefill resumes, and decoding goes on each step but those that it is owed."""
    scheduler = Scheduler(BlockPool(400, BLOCK), ResumeRules(), Limits(8, 4, STARVATION), model="m")
    for number in range(4):
        scheduler.add(arrive(f"d{number}", 1, output=500))
    now, steps = 0, 0
    while len(scheduler.running) < 4:
        finish_step(scheduler, scheduler.schedule(now))
    scheduler.add(long := arrive("long", 12, at=now))
    while long.num_generated == 0:
        now, steps = now + 10, steps + 1
        plan = scheduler.schedule(now)
        assert len(plan.chunks) >= 1
        finish_step(scheduler, plan)
    assert steps <= 12 // 2 * (STARVATION // 10 + 2)  # at least half a step once in so long


def test_a_low_priority_gets_its_first_token_beside_an_endless_stream_of_higher_ones() -> None:
    """Its blocks are taken away for as long as it is not starving, and never before its token once it is."""
    scheduler = Scheduler(BlockPool(32, 16), ResumeRules(), Limits(8, 64, STARVATION), model="m")
    scheduler.add(low := arrive("low", 400, priority=5))
    now = number = 0
    while low.num_generated == 0:
        assert now < 60 * STARVATION, f"it is at row {low.num_computed}"
        now += 10
        while len(scheduler.waiting) < 3:
            number += 1
            scheduler.add(arrive(f"h{number}", 200, at=now))
        finish_step(scheduler, scheduler.schedule(now))
    assert number > 3


def test_one_that_is_owed_a_token_leaves_half_of_the_rows_to_those_that_decode() -> None:
    scheduler = Scheduler(BlockPool(400, BLOCK), ResumeRules(), Limits(8, 8, STARVATION), model="m")
    for number in range(3):
        scheduler.add(arrive(f"d{number}", 1, output=500))
    finish_step(scheduler, scheduler.schedule(0))
    scheduler.add(long := arrive("long", 40, priority=3))
    now = STARVATION + 1
    while long.num_generated == 0:
        plan = scheduler.schedule(now)
        now += 1
        rows = {chunk.sequence.id: chunk.count for chunk in plan.chunks}
        assert {rows.get(f"d{number}") for number in range(3)} == {1}
        assert rows["long"] == min(5, long.num_missing)
        finish_step(scheduler, plan)
        long.served_ns = now


def test_a_budget_of_one_row_goes_on_beside_one_that_starves_and_lacks_blocks() -> None:
    scheduler = Scheduler(BlockPool(4, BLOCK), ResumeRules(), Limits(4, 1, STARVATION), model="m")
    scheduler.add(arrive("first", 8))
    finish_step(scheduler, scheduler.schedule(0))
    scheduler.add(arrive("starving", 12))
    ended: list[str] = []
    for now in range(100, 200):
        if not scheduler.running and not scheduler.waiting:
            break
        plan = scheduler.schedule(now)
        assert sum(chunk.count for chunk in plan.chunks) == 1
        ended += finish_step(scheduler, plan)
    assert ended == ["first", "starving"]


@dataclass(slots=True)
class Told:
    """What the machine knows of a request."""

    sequence: Sequence
    expected: int
    lineage: tuple[int, ...] | None = None
    unserved_since: int = 0
    ended: bool = field(default=False)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, run, fork and are aborted, blocks run out, and weights change."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(16, BLOCK)
        self.scheduler = Scheduler(self.pool, WINDOWED, Limits(3, 10, STARVATION, 2 * BLOCK), model="m")
        self.told: dict[str, Told] = {}
        self.now = self.number = 0

    def live(self) -> list[Told]:
        return [told for told in self.told.values() if not told.ended]

    @precondition(lambda self: len(self.live()) < 6)
    @rule(
        kind=st.integers(0, 1), length=st.integers(1, 40), output=st.integers(1, 8),
        priority=st.integers(-1, 1), slack=st.sampled_from([0.0, 1e-5]),
    )  # fmt: skip
    def add(self, kind: int, length: int, output: int, priority: int, slack: float) -> None:
        self.number += 1
        name = f"r{self.number}"
        ids = tuple(kind * 100 + position // 6 for position in range(length))
        request = Request(name, ids, SamplingParams(max_tokens=output), priority, slack)
        sequence = Sequence(request, list(ids), length, stages=Stages(arrived_ns=self.now))
        self.scheduler.add(sequence)
        self.told[name] = Told(sequence, output, unserved_since=self.now)

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.now += 7
            plan = self.scheduler.schedule(self.now)
            assert plan.chunks or not self.live(), "there is work, and none was scheduled"
            left = 10 - sum(chunk.count for chunk in plan.chunks)
            assert left == self.scheduler._budget >= 0
            served = {chunk.sequence.id for chunk in plan.chunks}
            assert len(served) == len(plan.chunks)
            for told in self.live():
                if told.sequence.id in served:
                    told.unserved_since = self.now
            for name in finish_step(self.scheduler, plan):
                told = self.told[name]
                told.ended = True
                assert told.sequence.num_generated == told.expected

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        told = data.draw(st.sampled_from(self.live()))
        self.scheduler.remove(told.sequence)
        told.ended = True

    @precondition(lambda self: any(t.sequence in self.scheduler.running for t in self.live()))
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from([t for t in self.live() if t.sequence in self.scheduler.running]))
        self.number += 1
        child = parent.sequence.fork(self.number)
        self.scheduler.fork(parent.sequence, child)
        self.told[child.id] = Told(child, parent.expected, unserved_since=self.now)

    @rule()
    def renew(self) -> None:
        self.scheduler.renew("m", f"{self.number}")
        for told in self.live():
            told.lineage = None
        assert self.pool.statistics().cached == 0

    @invariant()
    def books_balance(self) -> None:
        self.scheduler.check_integrity()
        placed = {s.id for s in (*self.scheduler.waiting, *self.scheduler.running)}
        assert placed == {told.sequence.id for told in self.live()}

    @invariant()
    def a_lineage_stays_what_it_was(self) -> None:
        for told in self.live():
            if told.lineage is None:
                told.lineage = told.sequence.resumed
            assert told.sequence.resumed == told.lineage

    @invariant()
    def nobody_is_forgotten(self) -> None:
        """Each starving one takes its turn: the wait is bounded by those before it."""
        for told in self.live():
            assert self.now - told.unserved_since <= STARVATION + 7 * 60

    def teardown(self) -> None:
        for _ in range(2000):
            if not self.live():
                break
            self.step(1)
        assert not self.live(), "it does not end"
        assert self.pool.statistics().held == 0


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
