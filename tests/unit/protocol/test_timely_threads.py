"""A thread is up within seconds, or whoever started it hears that it will never run."""

import _thread
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from thread_shortage import run_short

from protocol import threads as module
from protocol.threads import NoThread, TimelyThread

PATIENCE_S = 20.0  # for what comes at once, or never

# Of the threads' own stacks the C library has kept some, so the kernel starts them; Python finds nothing.
SHORT = """
import resource, threading
from pathlib import Path
from protocol import threads
from protocol.threads import NoThread, TimelyThread

threads._UP_S = 0.5
for _ in range(2):
    several = [threading.Thread(target=lambda: None) for _ in range(4)]
    for thread in several: thread.start()
    for thread in several: thread.join()
pages = int(Path("/proc/self/statm").read_text().split()[0])
unlimited = resource.getrlimit(resource.RLIMIT_AS)
hold, outcome, errors = [], None, (NoThread, MemoryError)
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), unlimited[1]))
try:
    size = 1 << 20
    while size >= 16:
        try:
            hold.append(bytearray(size))
        except MemoryError:
            size //= 2
    TimelyThread(int, name="x").start()
except errors as error:
    outcome = error
hold.clear()
resource.setrlimit(resource.RLIMIT_AS, unlimited)
print(type(outcome).__name__)
"""


class Late:
    """Threads that come up when they are let."""

    def __init__(self, patches: pytest.MonkeyPatch) -> None:
        self.begun: list[Callable[[], object]] = []
        patches.setattr("threading._start_new_thread", self.start)

    def start(self, begin: Callable[[], object], _: tuple[()]) -> int:
        self.begun.append(begin)
        return 0

    def come_up(self) -> None:
        """Blocks until they have ended."""
        ended = threading.Semaphore(0)

        def run(begin: Callable[[], object]) -> None:
            try:
                begin()
            finally:
                ended.release()

        for begin in self.begun:
            _thread.start_new_thread(run, (begin,))
            assert ended.acquire(timeout=PATIENCE_S)


def test_it_is_a_thread_like_others() -> None:
    seen: list[threading.Thread] = []
    thread = TimelyThread(lambda: seen.append(threading.current_thread()), name="one")
    assert not thread.has_begun
    thread.start()
    thread.join(PATIENCE_S)
    assert seen == [thread]
    assert (thread.name, thread.daemon, thread.is_alive(), thread.has_begun) == ("one", True, False, True)
    assert not TimelyThread(int, name="two", daemon=False).daemon


def test_what_its_work_raises_is_told_as_of_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> NoReturn:
        raise LookupError

    seen: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_type))
    thread = TimelyThread(fail, name="one")
    thread.start()
    thread.join(PATIENCE_S)
    assert seen == [LookupError]


def test_one_that_does_not_come_up_is_waited_for_so_long(shortage: pytest.MonkeyPatch) -> None:
    thread = TimelyThread(int, name="one")
    with pytest.raises(NoThread, match=r"start new thread|not up within"):
        thread.start()
    assert not thread.is_alive()
    assert not thread.has_begun
    assert thread.take_back() is None


def test_nothing_stays_that_waits_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the thread in which it is started, nor what it was to do."""
    ends, start = threading.Semaphore(0), TimelyThread._start

    def told(thread: TimelyThread) -> None:
        start(thread)
        ends.release()

    def work() -> None: ...

    run_short(monkeypatch, "its own dead")
    monkeypatch.setattr(TimelyThread, "_start", told)
    held = weakref.ref(work)
    for _ in range(3):
        with pytest.raises(NoThread):
            TimelyThread(work, name="one").start()
        assert ends.acquire(timeout=PATIENCE_S)
    del work
    gc.collect()
    assert held() is None


def test_one_that_comes_up_late_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    late, done = Late(monkeypatch), list[int]()
    monkeypatch.setattr(module, "_UP_S", 0.05)
    thread = TimelyThread(lambda: done.append(1), name="one")
    with pytest.raises(NoThread, match=r"not up within 0\.05 s"):
        thread.start()
    late.come_up()
    assert done == []
    assert thread not in threading.enumerate()


def test_an_interrupt_gives_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(thread: TimelyThread) -> NoReturn:
        raise KeyboardInterrupt

    late, done = Late(monkeypatch), list[int]()
    monkeypatch.setattr(TimelyThread, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        TimelyThread(lambda: done.append(1), name="one").start()
    late.come_up()
    assert done == []


def test_an_interrupt_at_its_very_begin_gives_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, done = list[Callable[[], object]](), list[int]()

    def interrupt(start: Callable[[], object], _: tuple[()]) -> NoReturn:
        begun.append(start)
        raise KeyboardInterrupt

    thread = TimelyThread(lambda: done.append(1), name="one")
    with monkeypatch.context() as patches:
        patches.setattr("_thread.start_new_thread", interrupt)
        with pytest.raises(KeyboardInterrupt):
            thread.start()
    begun[0]()
    assert done == []


def test_one_that_was_up_when_the_interrupt_came_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    wait, ends = TimelyThread.wait, threading.Event()

    def interrupt(thread: TimelyThread) -> NoReturn:
        while not thread.has_begun:
            wait(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(TimelyThread, "wait", interrupt)
    thread = TimelyThread(lambda: ends.wait(PATIENCE_S), name="one")
    with pytest.raises(KeyboardInterrupt):
        thread.start()
    assert thread.has_begun
    ends.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_it_is_started_once() -> None:
    goes_on, done = threading.Event(), list[int]()
    thread = TimelyThread(lambda: done.append(goes_on.wait(PATIENCE_S)), name="one")
    thread.start()
    with pytest.raises(RuntimeError, match="thread 'one' was started before"):
        thread.start()
    goes_on.set()
    thread.join(PATIENCE_S)
    with pytest.raises(RuntimeError, match="started before"):
        thread.begin()
    assert done == [True]


def test_one_that_was_given_up_is_neither_started_nor_waited_for(shortage: pytest.MonkeyPatch) -> None:
    thread, never = TimelyThread(int, name="one"), TimelyThread(int, name="two")
    with pytest.raises(NoThread):
        thread.start()
    never.take_back()
    shortage.undo()
    for each in (thread, never):
        each.join()
        with pytest.raises(RuntimeError, match="given up") as refused:
            each.start()
        assert not isinstance(refused.value, NoThread)
        assert not each.has_begun


def test_its_work_is_done_once_whoever_does_it() -> None:
    """Here or there: by the one that comes first."""
    for _ in range(200):
        done: list[threading.Thread] = []
        thread = TimelyThread(lambda done=done: done.append(threading.current_thread()), name="one")
        thread.begin()
        if (work := thread.take_back()) is not None:
            work()
            assert done == [threading.current_thread()]
        else:
            thread.join(PATIENCE_S)
            assert done == [thread]


@pytest.mark.parametrize("times", range(3))
def test_without_address_space_nobody_waits_for_ever(times: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHORT], capture_output=True, text=True, timeout=60, check=True,
        cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert done.stdout.strip() in ("NoThread", "MemoryError", "NoneType")
