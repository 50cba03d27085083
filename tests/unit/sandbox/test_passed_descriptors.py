"""Packets with descriptors: whose these are, and what comes where they find no room."""

import os
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest
from sandbox_places import count_fds, no_descriptor_left

from sandbox.errors import StartError
from sandbox.launcher import _Adoption
from sandbox.passed import receive


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
