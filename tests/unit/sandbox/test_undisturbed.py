"""What must not be parted is done apart, and undone where its caller has gone."""

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import FrameType

import pytest

from sandbox import undisturbed as module
from sandbox.undisturbed import undisturbed, undisturbed_call


class Interrupt(BaseException):
    """As a handler raises one."""


@pytest.fixture
def interrupt() -> Iterator[Callable[[], None]]:
    """Has a handler raise on the main thread, once for each call, which is another thread's."""
    has_come = threading.Event()

    def raise_it(number: int, frame: FrameType | None) -> None:
        if not has_come.is_set():
            has_come.set()
            raise Interrupt

    def send() -> None:
        has_come.clear()
        while not has_come.wait(0.001):  # again: what comes just before a thread waits is not heard there
            signal.pthread_kill(main, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, raise_it)
    main = threading.get_ident()
    yield send
    signal.signal(signal.SIGUSR1, before)


def test_a_call_has_its_result_or_error_and_its_context():
    variable: ContextVar[int] = ContextVar("variable")
    variable.set(7)
    assert undisturbed(lambda: (variable.get(), threading.current_thread())) != (7, threading.main_thread())
    assert undisturbed(variable.get) == 7
    with pytest.raises(ZeroDivisionError):
        undisturbed(lambda: 1 / 0, lambda _: pytest.fail("there is nothing to undo"))


def test_other_threads_do_it_themselves():
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.append(undisturbed(threading.current_thread)))
    thread.start()
    thread.join()
    assert seen == [thread]


def test_what_nobody_waits_for_any_more_is_undone_before_the_interrupt_goes_on(interrupt: Callable[[], None]):
    undone: list[str] = []

    def make() -> str:
        interrupt()
        return "made"

    with pytest.raises(Interrupt):
        undisturbed(make, undone.append)
    assert undone == ["made"]


def test_an_error_of_the_call_is_nothing_to_undo(interrupt: Callable[[], None]):
    def fail() -> str:
        interrupt()
        raise ZeroDivisionError

    with pytest.raises((Interrupt, ZeroDivisionError)):
        undisturbed(fail, lambda _: pytest.fail("there is nothing to undo"))
    assert undisturbed(lambda: 1) == 1


def test_who_has_no_patience_goes_on_and_others_do_not_wait(interrupt: Callable[[], None]):
    goes_on, undone = threading.Event(), threading.Event()

    def take_long() -> str:
        interrupt()
        goes_on.wait()
        return "made"

    with pytest.raises(Interrupt):
        undisturbed(take_long, lambda _: undone.set(), patience_s=0)
    assert undisturbed(lambda: 1) == 1
    assert not undone.is_set()
    goes_on.set()
    assert undone.wait(20)


def test_a_second_interrupt_goes_on_at_once(interrupt: Callable[[], None]):
    goes_on, undone = threading.Event(), threading.Event()
    undisturbed(int)
    queue = module._free[-1].give.__self__

    def take_long() -> None:
        interrupt()
        while not queue.qsize():  # the main thread waits for what is undone
            time.sleep(0)
        interrupt()
        goes_on.wait()

    with pytest.raises(Interrupt) as raised:
        undisturbed(take_long, lambda _: undone.set(), patience_s=1000)
    assert isinstance(raised.value.__context__, Interrupt)
    goes_on.set()
    assert undone.wait(20)


def test_what_is_interrupted_is_stopped_and_undone_though_nobody_waits(interrupt: Callable[[], None]):
    goes_on, undone = threading.Event(), threading.Event()

    def take_long() -> None:
        interrupt()
        goes_on.wait()

    with pytest.raises(Interrupt):
        undisturbed(take_long, lambda _: undone.set(), stop=goes_on.set, patience_s=0)
    assert undone.wait(20)


def test_what_comes_to_its_end_is_not_stopped():
    assert undisturbed(lambda: 1, stop=lambda: pytest.fail("it has ended")) == 1


def test_a_handler_may_call_what_its_thread_waits_for():
    """As one does that kills a sandbox while a command of it is waited for."""
    heard = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: undisturbed(heard.set))
    main = threading.get_ident()

    def wait() -> bool:
        while not heard.wait(0.001):
            signal.pthread_kill(main, signal.SIGUSR1)
        return True

    try:
        assert undisturbed(wait)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_threads_end_that_are_of_no_use_any_more(interrupt: Callable[[], None]):
    goes_on = threading.Event()

    def take_long() -> None:
        busy.append(threading.current_thread())
        interrupt()
        goes_on.wait()

    busy: list[threading.Thread] = []
    with pytest.raises(Interrupt):
        undisturbed(take_long, patience_s=0)
    goes_on.set()
    gc.collect()
    busy[0].join(20)
    assert not busy[0].is_alive()


def test_an_undoing_that_fails_harms_nobody(interrupt: Callable[[], None]):
    def undo(_: object) -> None:
        raise OSError

    with pytest.raises(Interrupt):
        undisturbed(interrupt, undo)
    assert undisturbed(lambda: 1) == 1


def test_a_child_of_a_fork_has_a_thread_of_its_own():
    undisturbed(int)
    child = os.fork()
    if child == 0:
        os._exit(undisturbed(lambda: 3))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def test_without_a_thread_it_is_done_all_the_same(monkeypatch: pytest.MonkeyPatch):
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(module, "_free", [])
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert undisturbed(threading.current_thread) is threading.main_thread()


def test_a_function_stays_what_it_is():
    @undisturbed_call
    def add(first: int, second: int = 2) -> int:
        """Adds."""
        return first + second

    assert (add(1), add.__name__, add.__doc__) == (3, "add", "Adds.")


def test_nothing_of_a_call_is_kept():
    class Thing:
        pass

    gone = threading.Event()

    def make() -> None:
        weakref.finalize(undisturbed(Thing), gone.set)

    make()
    undisturbed(int)
    assert gone.wait(20)
