"""Packets with descriptors: whose these are, and what comes where they find no room."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from lingering import lingering
from sandbox_places import count_fds, no_descriptor_left

from sandbox.errors import StartError
from sandbox.launcher import _Adoption
from sandbox.passed import hang_up, is_socket, let_go, receive


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


def test_none_is_inherited_by_what_is_started_meanwhile(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
):
    """So nobody has to say so behind it, where another thread may have forked."""
    monkeypatch.setattr(os, "set_inheritable", None)
    ours, theirs = pair
    socket.send_fds(theirs, [b"two"], [0, 0])
    data, fds, is_cut = receive(ours, 100, num_fds=2)
    assert (data, len(fds), is_cut) == (b"two", 2, False)
    assert not any(map(os.get_inheritable, fds))
    for fd in fds:
        os.close(fd)


def test_a_descriptor_that_finds_no_room_is_said(pair: tuple[socket.socket, socket.socket]):
    ours, theirs = pair
    socket.send_fds(theirs, [b"one"], [0])
    with no_descriptor_left():
        assert receive(ours, 100) == (b"one", [], True)


def test_the_end_is_an_empty_packet(pair: tuple[socket.socket, socket.socket]):
    ours, theirs = pair
    theirs.close()
    assert receive(ours, 100) == (b"", [], False)


def test_more_than_are_expected_are_let_go(pair: tuple[socket.socket, socket.socket]):
    ours, theirs = pair
    before = count_fds()
    socket.send_fds(theirs, [b"many"], [0] * 253)
    data, fds, is_cut = receive(ours, 100, num_fds=2)
    assert (data, len(fds), is_cut) == (b"many", 2, True)
    let_go(fds)
    assert (fds, count_fds()) == ([], before)


def test_a_socket_in_a_file_system_is_none(tmp_path: Path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        assert is_socket(listener.fileno())
    fd = os.open(tmp_path / "socket", os.O_PATH)
    assert not is_socket(fd)
    os.close(fd)


@pytest.mark.parametrize("is_empty", [False, True], ids=["packet", "empty"])
@pytest.mark.parametrize("is_nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("way", ["received", "unread", "behind", "beside"])
def test_a_socket_that_waits_for_its_content_holds_up_nobody(
    pair: tuple[socket.socket, socket.socket], way: str, is_nested: bool, is_empty: bool
):
    """Whoever closes it last waits for ten minutes here."""
    ours, theirs = pair
    with socket.create_server(("127.0.0.1", 0)) as listener:
        given = nested(lingering(listener)) if is_nested else lingering(listener)
        data = b"" if is_empty else b"x"
        if way == "behind":
            theirs.send(b"")
        socket.send_fds(theirs, [data], [given.fileno()] * (2 if way == "beside" else 1))
        given.close()
        if way in ("received", "beside"):
            packet = receive(ours, 100)
            assert len(packet.fds) == 1
            let_go(packet.fds)
        hang_up(ours)
        assert ours.fileno() < 0 or way in ("unread", "behind")
        threads = list[threading.Thread]()
        while not threads:
            time.sleep(0.001)
            threads = closing()
    for each in threads:  # the other end is gone, and nothing is waited for any more
        each.join(30)
        assert not each.is_alive()


def closing() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "dockyard-close" and each.is_alive()]


def test_the_end_of_a_connection_takes_no_thread(pair: tuple[socket.socket, socket.socket]):
    ours, theirs = pair
    theirs.close()
    hang_up(ours)
    hang_up(ours)
    assert ours.fileno() < 0
    assert closing() == []


def nested(slow: socket.socket) -> socket.socket:
    """A socket in which that one lies."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    socket.send_fds(theirs, [b"x"], [slow.fileno()])
    slow.close()
    theirs.close()
    return ours


@pytest.mark.parametrize("step", ["adopt", "join", "neither"])
def test_a_resolvers_socket_is_closed_unless_it_has_been_taken(step: str):
    """Or it would hold the network namespace of a sandbox that never was."""
    taken = list[socket.socket]()

    class Adopter:
        def adopt(self, pid: int) -> None:
            if step == "adopt":
                raise StartError("no ids", phase="launch")

        def join(self, pid: int, resolver: socket.socket | None) -> None:
            if step == "join":
                raise StartError("no group", phase="launch")
            assert resolver is not None
            taken.append(resolver)

    before = count_fds()
    with _Adoption(Adopter()) as adoption, socket.socket(fileno=os.dup(adoption._theirs.fileno())) as other:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as resolver:
            socket.send_fds(other, [b"hello"], [resolver.fileno()])
        with suppress(StartError):
            adoption.serve(os.getpid(), 20)
        assert [each.fileno() >= 0 for each in taken] == [True] * (step == "neither")
    for each in taken:
        each.close()
    assert count_fds() == before
