"""Watched calls: their answers and errors come back, and whoever waits too long gives up on one."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from engine.errors import Overloaded
from engine.sampling.watch import TooSlow, Watch


@pytest.fixture
def watch() -> Iterator[Watch]:
    made = Watch()
    yield made
    made.close()


def fail() -> bool:
    raise RuntimeError("as it is")


def busy_until(end: threading.Event) -> Callable[[], bool]:
    def work() -> bool:
        while not end.is_set():
            pass
        return True

    return work


def test_answers_come_back_with_their_time(watch: Watch) -> None:
    for answer in (True, False):
        said, took_s = watch.run(lambda answer=answer: answer, 1.0)
        assert said is answer
        assert took_s >= 0


def test_errors_come_back_and_the_next_call_is_answered(watch: Watch) -> None:
    with pytest.raises(RuntimeError, match="as it is"):
        watch.run(fail, 1.0)
    assert watch.run(lambda: True, 1.0)[0]


def test_a_call_that_only_waits_for_the_processor_is_not_given_up(watch: Watch) -> None:
    def idle() -> bool:
        time.sleep(0.2)
        return True

    assert watch.run(idle, 0.1)[0]


def test_a_slow_call_is_given_up_and_answers_nobody(watch: Watch) -> None:
    end = threading.Event()
    try:
        with pytest.raises(TooSlow, match=r"more than 0\.02 s"):
            watch.run(busy_until(end), 0.02)
        assert watch.run(lambda: False, 1.0)[0] is False
    finally:
        end.set()


def test_few_work_on_that_have_been_given_up(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.sampling.watch._MOST_LOST", 1)
    end = threading.Event()
    try:
        with pytest.raises(TooSlow):
            watch.run(busy_until(end), 0.02)
        with pytest.raises(Overloaded, match="still at work"):
            watch.run(lambda: True, 1.0)
    finally:
        end.set()
    for thread in watch._lost:
        thread.join()
    assert watch.run(lambda: True, 1.0)[0]
