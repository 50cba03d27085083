"""The line of those that wait against its plain definition: `min(waiting, key=urgency)`."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.request import Request, Sequence, Stages
from engine.scheduler import waiting
from engine.scheduler.urgency import Urgency, is_starving, urgency
from engine.scheduler.waiting import WaitingLine

STARVATION = 40


def arrive(number: int, at: int = 0, priority: int = 0, slack_ms: float = 0.0) -> Sequence:
    request = Request(f"r{number:07d}", (1, 2, 3), priority=priority, slack_ms=slack_ms)
    return Sequence(request, [1, 2, 3], 3, stages=Stages(arrived_ns=at))


class LineMachine(RuleBasedStateMachine):
    """Sequences come, leave to run, come back with or without a new token, and time goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.line = WaitingLine(STARVATION)
        self.plain: list[Sequence] = []
        self.away: list[Sequence] = []
        self.now = self.number = 0
        self.line.advance(0)

    def mark(self) -> None:
        """As the scheduler does at the start of a step."""
        for sequence in self.plain:
            if is_starving(sequence, self.now, STARVATION):
                sequence.owed_at = len(sequence.token_ids)

    @rule(priority=st.integers(-2, 2), slack=st.sampled_from([0.0, 1e-5, 1e-4]), ago=st.integers(0, 90))
    def add(self, priority: int, slack: float, ago: int) -> None:
        self.number += 1
        sequence = arrive(self.number, self.now - ago, priority, slack)
        self.plain.append(sequence)
        self.line.add(sequence)

    @precondition(lambda self: self.plain)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.plain))
        self.plain.remove(sequence)
        self.line.remove(sequence)
        self.away.append(sequence)

    @precondition(lambda self: self.away)
    @rule(data=st.data(), served=st.booleans(), token=st.booleans())
    def come_back(self, data: st.DataObject, served: bool, token: bool) -> None:
        sequence = data.draw(st.sampled_from(self.away))
        self.away.remove(sequence)
        if served:
            sequence.served_ns = self.now
        if token:
            sequence.token_ids.append(4)
        self.plain.append(sequence)
        self.line.add(sequence)

    @rule(passes=st.sampled_from([1, 7, 41, 200]))
    def wait(self, passes: int) -> None:
        self.now += passes
        self.line.advance(self.now)
        self.mark()

    @invariant()
    def the_first_is_the_most_urgent(self) -> None:
        self.line.check_integrity()
        assert list(self.line) == self.plain
        assert len(self.line) == len(self.plain)
        assert self.line.any_starving == any(is_starving(s, self.now, STARVATION) for s in self.plain)
        if self.plain:
            expected = min(self.plain, key=lambda s: urgency(s, self.now, STARVATION))
            assert self.line.first() is expected


TestLine = LineMachine.TestCase
TestLine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_what_has_left_does_not_gather() -> None:
    line = WaitingLine(STARVATION)
    for number in range(5_000):
        sequence = arrive(number, number)
        line.add(sequence)
        line.advance(number)
        line.remove(sequence)
        assert not line._calm
        assert not line._starving
        assert not line._due
    line.add(last := arrive(0))
    for number in range(5_000):
        line.add(sequence := arrive(number + 1, number))
        line.advance(number)
        line.remove(sequence)
    line.check_integrity()
    assert max(len(heap) for heap in (line._calm, line._starving, line._due)) <= 67
    assert list(line) == [last]


def test_a_long_line_is_not_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Sequence] = []

    def counting(sequence: Sequence, now_ns: int, starvation_ns: int) -> Urgency:
        asked.append(sequence)
        return urgency(sequence, now_ns, starvation_ns)

    monkeypatch.setattr(waiting, "urgency", counting)
    line = WaitingLine(1 << 60)
    for number in range(10_000):
        line.add(arrive(number, number))
    asked.clear()
    for number in range(200):
        line.advance(number)
        first = line.first()
        line.remove(first)
        line.add(first)
    assert len(asked) == 200
