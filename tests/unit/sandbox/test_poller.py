"""Everybody who is served has their turns and one end, whatever becomes of the others."""

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import MethodType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thread_shortage import WAYS, Way, dead_at_birth, run_short

import sandbox.poller as poller_module
from protocol.threads import TimelyThread
from sandbox.missing_threads import Shortage
from sandbox.poller import Poller, _Agenda

PATIENCE_S = 10


@dataclass
class Counter:
    """Has a turn for each byte of a pipe, and for each time that it is due."""

    due_s: list[float] = field(default_factory=list[float])
    raises: bool = False
    name: str = "counter"
    turns: int = 0
    late_turns: int = 0
    is_over: bool = False
    ended_on: threading.Thread | None = None

    def __post_init__(self) -> None:
        self.reading, self.writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.ended, self.turned = threading.Event(), threading.Semaphore(0)
        self.ring()

    def ring(self, data: bytes = b"x") -> None:
        os.write(self.writing, data)

    def fileno(self) -> int:
        return self.reading

    def turn(self) -> bool:
        try:
            data = os.read(self.reading, 1)
        except BlockingIOError:
            data = b""
        self.turns += 1
        self.late_turns += self.is_over
        self.is_over = self.is_over or data == b"."
        self.turned.release()
        if self.raises:
            raise LookupError
        return data != b"."

    def wait_s(self) -> float | None:
        return self.due_s.pop() if self.due_s else None

    def end(self) -> None:
        self.ended_on = threading.current_thread()
        os.close(self.reading)
        os.close(self.writing)
        self.ended.set()

    def wait_for_turns(self, count: int) -> None:
        for _ in range(count):
            assert self.turned.acquire(timeout=PATIENCE_S)


@pytest.fixture
def poller(monkeypatch: pytest.MonkeyPatch) -> Iterator[Poller]:
    monkeypatch.setattr(poller_module, "shortage", Shortage())
    one = Poller()
    yield one
    assert one.num_served == 0


def count_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_each_has_turns_and_the_thread_ends_with_the_last(poller: Poller):
    before, thread = count_fds(), None
    counters = [Counter() for _ in range(30)]
    for one in counters:
        poller.serve(one)
    thread = poller._thread
    for one in counters:
        one.ring(b"xx.")
        one.wait_for_turns(4)
        assert one.ended.wait(PATIENCE_S)
    assert [one.turns for one in counters] == [4] * 30
    assert thread is not None
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert count_fds() == before


def test_it_serves_again_after_its_last(poller: Poller):
    for _ in range(50):
        one = Counter()
        poller.serve(one)
        one.ring(b".")
        assert one.ended.wait(PATIENCE_S)


def test_a_turn_comes_when_it_is_due(poller: Poller):
    one = Counter(due_s=[0.0, 0.01, 0.0])
    poller.serve(one)
    one.wait_for_turns(4)
    one.ring(b".")
    assert one.ended.wait(PATIENCE_S)
    assert one.turns == 5


def test_who_is_always_ready_holds_nobody_up(poller: Poller):
    loud, still = Counter(due_s=[0.0] * 1_000_000), Counter()
    poller.serve(loud)
    poller.serve(still)
    loud.wait_for_turns(100)
    still.ring()
    still.wait_for_turns(2)
    for one in (loud, still):
        one.ring(b".")
        assert one.ended.wait(PATIENCE_S)


def test_a_fault_ends_who_has_it(poller: Poller, monkeypatch: pytest.MonkeyPatch):
    seen: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_type))
    good, bad = Counter(), Counter(raises=True)
    poller.serve(good)
    poller.serve(bad)
    assert bad.ended.wait(PATIENCE_S)
    assert seen == [LookupError]
    good.wait_for_turns(1)
    good.ring(b".")
    assert good.ended.wait(PATIENCE_S)


def test_an_end_is_on_a_thread_of_its_own_where_there_is_one(poller: Poller, monkeypatch: pytest.MonkeyPatch):
    one, other = Counter(), Counter()
    poller.serve(one)
    poller.serve(other)
    own = poller._thread
    one.ring(b".")
    assert one.ended.wait(PATIENCE_S)
    assert one.ended_on is not own

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patches:
        patches.setattr(threading.Thread, "start", refuse)
        other.ring(b".")
        assert other.ended.wait(PATIENCE_S)
    assert other.ended_on is own


def test_an_end_whose_thread_never_comes_up_is_the_pollers_and_the_others_have_turns_meanwhile(
    poller: Poller, monkeypatch: pytest.MonkeyPatch
):
    """For want of memory a thread may end without a word: whoever had started it waited for ever."""
    lost, begun = threading.Event(), list[TimelyThread]()

    def lose(bootstrap: MethodType, _: tuple[()]) -> int:
        begun.append(bootstrap.__self__)
        lost.set()
        return dead_at_birth(bootstrap)

    one, other = Counter(), Counter()
    poller.serve(one)
    poller.serve(other)
    own = poller._thread
    with monkeypatch.context() as patches:
        patches.setattr("protocol.threads._UP_S", 3600.0)
        patches.setattr("threading._start_new_thread", lose)
        one.ring(b".")
        assert lost.wait(PATIENCE_S)
        other.ring(b"x" * 100)
        other.wait_for_turns(100)
        assert not one.ended.is_set()
        begun[0]._late_s = 0.0
        assert one.ended.wait(PATIENCE_S)
    assert one.ended_on is own
    begun[0].run()  # it comes up after all, and ends nobody twice
    other.ring(b".")
    assert other.ended.wait(PATIENCE_S)
    assert other.ended_on is not own


def test_after_one_that_was_lost_no_end_waits_as_long(poller: Poller, monkeypatch: pytest.MonkeyPatch):
    """Nor the last one, with which the poller's own thread ends."""
    begun, lost = list[TimelyThread](), threading.Semaphore(0)

    def lose(bootstrap: MethodType, _: tuple[()]) -> int:
        begun.append(bootstrap.__self__)
        lost.release()
        return dead_at_birth(bootstrap)

    counters = [Counter() for _ in range(4)]
    for one in counters:
        poller.serve(one)
    own = poller._thread
    assert own is not None
    with monkeypatch.context() as patches:
        patches.setattr("protocol.threads._UP_S", 3600.0)
        patches.setattr("threading._start_new_thread", lose)
        for one in counters[:2]:
            one.ring(b".")
            assert lost.acquire(timeout=PATIENCE_S)
        assert not any(one.ended.is_set() for one in counters)
        begun[0]._late_s = 0.0
        for one in counters[2:]:
            one.ring(b".")
        for one in counters:
            assert one.ended.wait(PATIENCE_S)
        own.join(PATIENCE_S)
    assert not own.is_alive()
    one, other = Counter(), Counter()
    for each in (one, other):
        poller.serve(each)
    own = poller._thread
    for each in (one, other):
        each.ring(b".")
        assert each.ended.wait(PATIENCE_S)
        assert each.ended_on is not own  # there are threads again


@pytest.mark.parametrize(
    "step",
    ["Poller._take_rung", "_Agenda.wait_s", "_Agenda.take_due", "_Ends.wait_s", "_Ends.look", "_Ends.settle"],
)
def test_want_of_memory_costs_nobody_a_turn(poller: Poller, monkeypatch: pytest.MonkeyPatch, step: str):
    """What the step found is lost with it."""
    failures = iter(range(20))
    kind, name = step.split(".")
    owner = getattr(poller_module, kind)
    done = getattr(owner, name)

    def fail(self: object) -> object:
        found = done(self)
        if next(failures, None) is not None:
            raise MemoryError
        return found

    monkeypatch.setattr(poller_module, "_LOOK_S", 0.001)
    one, other = Counter(due_s=[0.0] * 5), Counter()
    poller.serve(other)
    other.wait_for_turns(1)
    own = poller._thread
    monkeypatch.setattr(owner, name, fail)
    poller.serve(one)
    one.wait_for_turns(6)
    for _ in range(5):
        poller.ring(other.fileno())
        other.wait_for_turns(1)
    for each in (one, other):
        each.ring(b"x.")
        assert each.ended.wait(PATIENCE_S)
    assert own is not None
    own.join(PATIENCE_S)
    assert not own.is_alive()
    last = Counter()
    poller.serve(last)
    last.ring(b".")
    assert last.ended.wait(PATIENCE_S)


@pytest.mark.parametrize(
    ("owner", "part"), [(Poller, "_part"), (poller_module, "TimelyThread")], ids=["seat", "thread"]
)
def test_want_of_memory_costs_nobody_an_end(
    poller: Poller, monkeypatch: pytest.MonkeyPatch, owner: object, part: str
):
    """Nor does anybody have a turn after their last."""
    counters = [Counter() for _ in range(5)]
    for one in counters:
        poller.serve(one)
    failures, done = iter(range(3)), getattr(owner, part)

    def fail(*args: object, **options: object) -> object:
        if next(failures, None) is not None:
            raise MemoryError
        return done(*args, **options)

    monkeypatch.setattr(owner, part, fail)
    for one in counters:
        one.ring(b".x")
        assert one.ended.wait(PATIENCE_S)
        assert one.late_turns == 0


def test_who_finds_no_memory_to_be_served_is_not(poller: Poller, monkeypatch: pytest.MonkeyPatch):
    first, one = Counter(), Counter()
    poller.serve(first)

    def fail(self: Poller, fd: int) -> None:
        self._rung.add(fd)
        raise MemoryError

    with monkeypatch.context() as patches:
        patches.setattr(Poller, "_ring", fail)
        with pytest.raises(MemoryError):
            poller.serve(one)
    assert poller.num_served == 1
    poller.serve(one)
    for each in (one, first):
        each.ring(b".")
        assert each.ended.wait(PATIENCE_S)


@pytest.mark.parametrize("way", WAYS)
def test_without_a_thread_each_has_its_end_all_the_same(
    poller: Poller, monkeypatch: pytest.MonkeyPatch, way: Way
):
    """The last one, too, with which the poller's own thread ends."""
    counters = [Counter() for _ in range(5)]
    for one in counters:
        poller.serve(one)
    own = poller._thread
    assert own is not None
    with monkeypatch.context() as patches:
        run_short(patches, way)
        for one in counters:
            one.ring(b".")
            assert one.ended.wait(PATIENCE_S)
    assert all(one.ended_on is own for one in counters)
    own.join(PATIENCE_S)
    assert not own.is_alive()


def test_who_has_no_thread_is_not_served_and_the_next_is(poller: Poller, shortage: pytest.MonkeyPatch):
    before, one = count_fds(), Counter()
    for _ in range(2):
        with pytest.raises(BlockingIOError, match="for counter"):
            poller.serve(one)
        assert (poller.num_served, count_fds()) == (0, before + 2)
    shortage.undo()
    poller.serve(one)
    one.ring(b".")
    assert one.ended.wait(PATIENCE_S)


def test_a_forked_child_serves_its_own_alone(poller: Poller):
    theirs = Counter()
    poller.serve(theirs)
    theirs.wait_for_turns(1)
    child = os.fork()
    if child == 0:
        ours = Counter()
        poller.serve(ours)
        ours.ring(b".")
        os._exit(0 if ours.ended.wait(PATIENCE_S) and poller.num_served == 0 else 1)
    assert os.waitpid(child, 0)[1] == 0
    theirs.ring(b".")
    assert theirs.ended.wait(PATIENCE_S)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.one_of(st.none(), st.just(0.0), st.just(3600.0))), max_size=400)
)
def test_an_agenda_knows_what_was_put_last(puts: list[tuple[int, float | None]]):
    agenda, known = _Agenda(), dict[int, float]()
    for fd, wait_s in puts:
        agenda.put(fd, wait_s)
        known.pop(fd, None)
        if wait_s is not None:
            known[fd] = wait_s
    due = {fd for fd, wait_s in known.items() if wait_s == 0}
    assert (agenda.wait_s() == 0) == bool(due)
    found = agenda.take_due()
    assert sorted(found) == sorted(due)
    left = agenda.wait_s()
    assert (left is None) == (len(known) == len(due))
    assert len(agenda._order) <= 2 * len(known) + 65
