"""Who makes a sandbox when: in the order in which they came, and never too many."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from sandbox.turns import Turns, turns_to_make


def until(holds: Callable[[], bool]) -> None:
    """Without a bound: a test that hangs is ended by its own."""
    while not holds():
        threading.Event().wait(0.001)


def test_they_come_in_order_and_never_too_many():
    turns, come, first = Turns(2, patience_s=60), list[int](), threading.Event()
    active, most = 0, 0
    guard = threading.Lock()

    def take(number: int) -> None:
        nonlocal active, most
        with turns.one():
            with guard:
                come.append(number)
                active += 1
                most = max(most, active)
            first.wait()
            with guard:
                active -= 1

    with ThreadPoolExecutor(8) as pool:
        for number in range(8):
            pool.submit(take, number)
            until(lambda number=number: len(come) + len(turns._waiting) == number + 1)
        assert come == [0, 1]
        first.set()
    assert sorted(come) == list(range(8))
    assert come[:2] == [0, 1]
    assert most == 2
    assert (turns._num_free, len(turns._waiting)) == (2, 0)


def test_patience_ends():
    turns = Turns(1, patience_s=0.01)
    with turns.one(), turns.one():
        assert (turns._num_free, len(turns._waiting)) == (0, 0)
    assert turns._num_free == 1


def test_who_fails_gives_its_turn_back():
    turns = Turns(1)
    with pytest.raises(RuntimeError), turns.one():
        raise RuntimeError
    assert turns._num_free == 1


def test_who_is_interrupted_while_it_waits_gives_up_its_place(monkeypatch: pytest.MonkeyPatch):
    turns = Turns(1)

    class Interrupted:
        """A lock whose wait ends with Ctrl-C."""

        def acquire(self, timeout: float = -1) -> bool:
            if timeout >= 0:
                raise KeyboardInterrupt
            return True

    with turns.one():
        monkeypatch.setattr(threading, "Lock", Interrupted)
        with pytest.raises(KeyboardInterrupt), turns.one():
            pass
        monkeypatch.undo()
        assert len(turns._waiting) == 0
    assert turns._num_free == 1


def test_a_forked_process_has_turns_of_its_own():
    count = turns_to_make()._num_free
    with turns_to_make().one():
        child = os.fork()
        if child == 0:
            os._exit(turns_to_make()._num_free)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == count
    assert turns_to_make()._num_free == count
