"""Links that a user's helper makes: an address is one sandbox's, and the kernel's map empties again."""

import ctypes
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from sandbox.egress import namespaces
from sandbox.helper_start import PROGRAM
from sandbox.privileged import networks
from sandbox.privileged.denials import NUMBERS

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="root runs the helper")

OBJECT = str(PROGRAM.parent / "egress" / "egress.bpf.o")
Make = Callable[[], tuple[str, int, int]]


@pytest.fixture
def uplink() -> Iterator[int]:
    fd = namespaces.new_namespace()
    yield fd
    os.close(fd)


@pytest.fixture
def programs() -> Iterator[networks.Programs]:
    one = networks.Programs(OBJECT, {})
    yield one
    one.close()


@pytest.fixture
def make(uplink: int, programs: networks.Programs) -> Iterator[Make]:
    """Another link, for a namespace of its own."""
    inner: list[int] = []

    def make_one() -> tuple[str, int, int]:
        inner.append(namespaces.new_namespace())
        return namespaces.run_in(uplink, lambda: programs.make_link(inner[-1]))

    yield make_one
    for each in inner:
        os.close(each)


def entries(programs: networks.Programs) -> set[int]:
    """Keys of the map of host ends' addresses: ifindexes."""
    library, found, key = ctypes.CDLL("libbpf.so.1"), set[int](), None
    following = ctypes.c_uint32()
    while library.bpf_map_get_next_key(programs.map("homes"), key, ctypes.byref(following)) == 0:
        found.add(following.value)
        key = ctypes.byref(ctypes.c_uint32(following.value))
    return found


def draw(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    left = iter(numbers)

    def choice(among: Sequence[int]) -> int:
        return next(left)

    monkeypatch.setattr(secrets, "choice", choice)


def test_nothing_stays_of_programs_that_refuse_their_denials():
    """Whoever asked may ask again, without end."""
    before = len([*Path("/proc/self/fd").iterdir()])
    with pytest.raises(OSError, match="write to denied"):
        networks.Programs(OBJECT, {b"\xff" * 20: bytes(136)})  # of a prefix that is longer than an address
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_a_link_whose_address_is_anothers_draws_again(
    make: Make, programs: networks.Programs, monkeypatch: pytest.MonkeyPatch
):
    first, second = NUMBERS[:2]
    draw(monkeypatch, first, first, first, second)
    made = [make(), make()]
    assert [number for _, _, number in made] == [first, second]
    assert entries(programs) == {ifindex for _, ifindex, _ in made}


def test_nothing_stays_of_a_link_that_is_removed_or_was_not_made(
    make: Make, uplink: int, programs: networks.Programs, monkeypatch: pytest.MonkeyPatch
):
    """However often: the map has room for 16,384 that one connection ever had."""
    draw(monkeypatch, *[NUMBERS[0]] * 9)
    name, ifindex, _ = make()
    with pytest.raises(OSError, match="File exists"):
        make()
    assert entries(programs) == {ifindex}
    namespaces.run_in(uplink, lambda: programs.remove_links(name))
    assert entries(programs) == set()
    assert [each for _, each in namespaces.run_in(uplink, socket.if_nameindex)] == ["lo"]
