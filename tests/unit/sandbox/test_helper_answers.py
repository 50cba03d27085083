"""What a helper says too late is nobody's answer, and nobody takes it for the helper's end."""

import errno
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from sandbox import helper
from sandbox.errors import CapacityError, StartError
from sandbox.helper import Helper
from sandbox.launcher import _Adoption

STATE = "u1x0123456789ab"
PATIENCE_S = 0.3


class Slow:
    """The other end of a connection, in the place of root's helper."""

    def __init__(self) -> None:
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with self.answering({"refused": "busy", "words": "not yet"}, {}):
            self.helper = Helper(theirs, STATE)

    def hear(self) -> list[Any]:
        return json.loads(self.connection.recv(512))

    def answer(self, verb: str, name: str, number: int, /, *fds: int, **said: Any) -> None:
        packet = json.dumps({**said, "request": number}).encode()
        socket.send_fds(self.connection, [packet], list(fds))

    @contextmanager
    def answering(self, *answers: dict[str, Any], fds: tuple[int, ...] = ()) -> Generator[None]:
        """One request each, on a thread."""

        def answer_all() -> None:
            for said in answers:
                self.answer(*self.hear(), *fds, **said)

        thread = threading.Thread(target=answer_all)
        thread.start()
        yield
        thread.join()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    monkeypatch.setattr(helper, "_PATIENCE_S", PATIENCE_S)
    one = Slow()
    yield one
    one.connection.close()
    one.helper.close()


def num_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_late_answer_is_not_the_next_ones(slow: Slow):
    """With what it brings along."""
    with pytest.raises(StartError, match="timed out"):
        slow.helper.adopt("sbx-1", os.getpid())
    before = num_fds()
    with Path("/dev/null").open() as file:
        slow.answer(*slow.hear(), file.fileno())
    with slow.answering({"refused": "failed", "words": "no"}), pytest.raises(StartError, match="failed: no"):
        slow.helper.join("sbx-1", os.getpid())
    assert num_fds() == before


def test_who_has_answered_late_has_not_ended(slow: Slow, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(helper.os, "geteuid", lambda: 1)
    monkeypatch.setattr(helper, "_connect", lambda place: None)
    way = helper._Way(STATE)
    way._helper = slow.helper
    monkeypatch.setitem(helper._ways, helper.cgroups.state_key(tmp_path), way)
    with pytest.raises(StartError, match="timed out"):
        slow.helper.adopt("sbx-1", os.getpid())
    slow.answer(*slow.hear())
    assert helper.shared_helper(tmp_path) is slow.helper
    slow.connection.close()
    assert helper.shared_helper(tmp_path) is None


def test_who_waits_behind_a_request_without_an_answer_is_told_the_same_at_once(slow: Slow):
    """What is to be given back is said all the same."""
    errors = list[str]()

    def adopt() -> None:
        with pytest.raises(StartError) as caught:
            slow.helper.adopt("sbx-1", os.getpid())
        errors.append(caught.value.message)

    threads = [threading.Thread(target=adopt) for _ in range(8)]
    threads += [threading.Thread(target=slow.helper.release, args=(f"sbx-{at}",)) for at in range(3)]
    began = time.monotonic()
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert time.monotonic() - began < 6 * PATIENCE_S
    assert len(errors) == 8
    assert {*errors} == {"the helper does not answer: timed out"}
    slow.connection.setblocking(False)
    heard = list[list[Any]]()
    with suppress(BlockingIOError):
        while True:
            heard.append(slow.hear())
    assert sorted(name for verb, name, _ in heard if verb == "release") == ["sbx-0", "sbx-1", "sbx-2"]
    slow.connection.setblocking(True)
    for each in heard:
        slow.answer(*each)
    with slow.answering({}, {}):
        for _ in range(2):
            slow.helper.join("sbx-1", os.getpid())


def test_who_waits_for_a_helper_that_does_not_answer_waits_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """And nobody with another state directory behind him. Who comes later tries again."""
    monkeypatch.setattr(helper, "_PATIENCE_S", 2 * PATIENCE_S)
    monkeypatch.setattr(helper.os, "geteuid", lambda: 1)
    ends, all_ask, all_connect = list[socket.socket](), threading.Barrier(16), threading.Barrier(4)

    def connect(place: Path) -> socket.socket:
        if len(ends) < 4:
            all_connect.wait(20)  # one for each state, none behind another
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ends.append(theirs)
        return ours

    monkeypatch.setattr(helper, "_connect", connect)
    errors = list[str]()

    def ask_with_others(state: Path) -> None:
        all_ask.wait(20)
        ask(state)

    def ask(state: Path) -> None:
        with pytest.raises(StartError) as caught:
            helper.shared_helper(state)
        errors.append(caught.value.message)

    states = [tmp_path / str(at) for at in range(4)]
    threads = [threading.Thread(target=ask_with_others, args=(state,)) for state in states * 4]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert errors == ["the helper does not answer: timed out"] * 16
    assert len(ends) == 4
    ask(states[0])
    assert len(ends) == 5
    for each in ends:
        each.close()


def test_who_tries_many_things_asks_a_silent_helper_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """On all threads. What failed before is tried again, and so it is behind it."""
    monkeypatch.setattr(helper, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(helper.os, "geteuid", lambda: 1)
    ends = list[socket.socket]()

    def connect(place: Path) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ends.append(theirs)
        return ours

    monkeypatch.setattr(helper, "_connect", connect)

    def ask() -> None:
        with pytest.raises(StartError, match="timed out"):
            helper.shared_helper(tmp_path)

    ask()
    with helper.asked_once(tmp_path):
        ask()
        with ThreadPoolExecutor(3) as threads:
            for each in [threads.submit(ask) for _ in range(9)]:
                each.result()
    assert len(ends) == 2
    ask()
    assert len(ends) == 3
    for each in ends:
        each.close()


@contextmanager
def free_descriptors(number: int) -> Generator[None]:
    """No more than these."""
    limits, taken = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, limits[1]))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(number):
            os.close(taken.pop())
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("number", range(6))
def test_an_owner_short_of_descriptors_is_told_so_and_loses_none(slow: Slow, number: int):
    """For the network that it shows, then for each of the maps that it is given."""
    before = num_fds()
    answers = [{"ifindex": 1, "number": 1}] if number else []
    with Path("/dev/null").open() as file, slow.answering(*answers, fds=(file.fileno(),) * 5):
        with free_descriptors(number), pytest.raises(CapacityError) as caught:
            slow.helper.link("sbx-1", os.getpid())
        assert "no descriptor is free" in caught.value.message or not number
    assert num_fds() == before


def test_a_sandbox_whose_resolver_finds_no_descriptor_does_not_start():
    """Rather than without its network."""

    class Adopter:
        def adopt(self, pid: int) -> None:
            raise AssertionError("it is adopted")

        def join(self, pid: int, resolver: socket.socket | None) -> None:
            raise AssertionError("it starts")

    with _Adoption(Adopter()) as adoption:
        with Path("/dev/null").open() as file:
            socket.send_fds(adoption._theirs, [b"x"], [file.fileno()])
        adoption._theirs.close()
        with free_descriptors(0), pytest.raises(CapacityError, match="no descriptor is free"):
            adoption.serve(os.getpid(), 1)


def test_a_want_of_the_helpers_is_one(slow: Slow):
    refusal = {"refused": "failed", "words": "Too many open files", "errno": errno.EMFILE}
    with slow.answering(refusal), pytest.raises(CapacityError, match="Too many open files"):
        slow.helper.adopt("sbx-1", os.getpid())


def test_one_before_whom_too_many_wait_is_no_helper_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The sandbox would have been made without what the helper gives."""
    monkeypatch.setattr(helper, "_PATIENCE_S", PATIENCE_S)
    place = tmp_path / "helper"
    assert helper._connect(place) is None
    with ExitStack() as sockets:
        listener = sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(str(place))
        listener.listen(0)
        first = sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        first.connect(str(place))
        with pytest.raises(CapacityError, match="too many wait for the helper"):
            helper._connect(place)
        later = threading.Timer(PATIENCE_S / 3, lambda: sockets.enter_context(listener.accept()[0]))
        later.start()
        connection = helper._connect(place)
        later.join()
        if connection is None:
            assert os.geteuid() != 0, "who listens is root"
        else:
            connection.close()


def test_one_for_whom_no_descriptor_is_left_to_ask_it_is_told_so(tmp_path: Path):
    with free_descriptors(0), pytest.raises(CapacityError, match="asking the helper: Too many open files"):
        helper._connect(tmp_path / "helper")
    with free_descriptors(1):
        assert helper._connect(tmp_path / "helper") is None
