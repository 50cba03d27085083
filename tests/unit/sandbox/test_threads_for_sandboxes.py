"""Threads that sandboxes need: where none comes up whoever asks is told, nobody waits for ever, and the next
try has one."""

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import NoReturn

import pytest
from thread_shortage import WAYS, Way, run_short

import sandbox.undisturbed as undisturbed_module
from protocol.clock import SystemClock
from protocol.threads import TimelyThread
from sandbox.aio_threads import threaded
from sandbox.door import Door, _Room, ask
from sandbox.egress.resolver import Resolver
from sandbox.errors import CapacityError, UnsupportedError
from sandbox.feed import Feed, Watchers
from sandbox.pool import Pool
from sandbox.processes import this_process
from sandbox.undisturbed import undisturbed

PATIENCE_S = 10


def is_so_in_a_child(check: Callable[[], bool]) -> bool:
    """For a door, which is open until its process ends."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if check() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def count_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_nothing_is_made_ahead_and_the_claimer_makes_it(shortage: pytest.MonkeyPatch):
    removed: list[int] = []
    pool = Pool(count().__next__, removed.append, 2)
    pool.wait()
    assert [pool.claim(), pool.claim(), pool.num_ready()] == [0, 1, 0]
    shortage.undo()
    pool.wait()
    assert pool.num_ready() == 2
    pool.close()
    assert removed == [2, 3]


def test_a_call_of_asyncio_is_refused(shortage: pytest.MonkeyPatch):
    called: list[int] = []

    async def work() -> None:
        with pytest.raises(CapacityError, match="ulimit -u"):
            await threaded(lambda: called.append(1))
        assert called == []
        shortage.undo()
        assert await threaded(lambda: 3) == 3

    asyncio.run(work())


def test_what_no_interrupt_may_part_is_done_all_the_same(shortage: pytest.MonkeyPatch):
    shortage.setattr(undisturbed_module, "_free", [])
    assert undisturbed(threading.current_thread) is threading.main_thread()
    assert undisturbed(threading.current_thread, stop=lambda: None) is threading.main_thread()


def test_a_command_with_watchers_is_refused(shortage: pytest.MonkeyPatch):
    said, done = list[str](), threading.Event()
    watchers = Watchers(on_stdout=said.append)
    with pytest.raises(CapacityError, match="ulimit -u"):
        Feed(watchers, lambda: None)
    shortage.undo()
    feed = Feed(watchers, lambda: None)
    feed.add(0, b"a")
    feed.finish(lambda error: done.set())
    assert done.wait(PATIENCE_S)
    assert said == ["a"]


def test_a_door_is_opened_by_a_later_try(shortage: pytest.MonkeyPatch):
    def check() -> bool:
        door, before = Door(lambda request, has_left, tell: "hello"), count_fds()
        is_open = [door.open(), door.open()]
        is_clean = count_fds() == before
        shortage.undo()
        return is_clean and [*is_open, door.open()] == [False, False, True]

    assert is_so_in_a_child(check)


def test_one_who_asks_is_told_and_keeps_nobodys_place(shortage: pytest.MonkeyPatch):
    room, talked = _Room(1), threading.Event()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for _ in range(2):
            with pytest.raises(CapacityError, match="has no thread left"):
                room.take(ours, lambda connection: talked.set())
        assert not talked.is_set()
        shortage.undo()
        room.take(ours, lambda connection: talked.set())
        assert talked.wait(PATIENCE_S)


@pytest.mark.parametrize("way", WAYS)
def test_a_door_goes_on_when_it_has_no_thread_for_an_answer(monkeypatch: pytest.MonkeyPatch, way: Way):
    def check() -> bool:
        door = Door(lambda request, has_left, tell: "hello")
        assert door.open()
        with monkeypatch.context() as patches:
            run_short(patches, way)
            with pytest.raises(CapacityError, match="has no thread left"):
                ask(this_process(), {})
        return ask(this_process(), {}) == "hello"

    assert is_so_in_a_child(check)


@pytest.mark.parametrize("error", [MemoryError(), OSError(), LookupError()])
def test_a_door_goes_on_behind_what_goes_wrong_with_one(monkeypatch: pytest.MonkeyPatch, error: Exception):
    def fail(connection: socket.socket) -> NoReturn:
        raise error

    def check() -> bool:
        seen: list[type[BaseException]] = []
        monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_type))
        door = Door(lambda request, has_left, tell: "hello")
        assert door.open()
        with monkeypatch.context() as patches:
            patches.setattr("sandbox.door._check_peer", fail)
            with pytest.raises(UnsupportedError, match="does not answer"):
                ask(this_process(), {})
        is_told = seen == ([LookupError] if isinstance(error, LookupError) else [])
        return ask(this_process(), {}) == "hello" and is_told

    assert is_so_in_a_child(check)


def test_one_for_whom_there_is_no_memory_keeps_nobodys_place(monkeypatch: pytest.MonkeyPatch):
    def fail(thread: TimelyThread) -> NoReturn:
        raise MemoryError

    room, talked = _Room(1), threading.Event()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with monkeypatch.context() as patches:
            patches.setattr(TimelyThread, "start", fail)
            with pytest.raises(MemoryError):
                room.take(ours, lambda connection: talked.set())
        room.take(ours, lambda connection: talked.set())
        assert talked.wait(PATIENCE_S)


def test_a_resolver_that_has_no_thread_leaves_nothing(shortage: pytest.MonkeyPatch):
    before = count_fds()
    with pytest.raises(BlockingIOError, match="for the resolver"):
        Resolver(lambda: None, None, SystemClock(), lambda: None)
    assert count_fds() == before
    shortage.undo()
    Resolver(lambda: None, None, SystemClock(), lambda: None).close()
