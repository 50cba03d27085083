"""A kernel's map that takes no more, or a write that fails: never a sandbox without rules, nor with half."""

import errno
import itertools
import os
import struct

import pytest
from sandbox_internet import HOST, OTHER, WEB, attempt

from sandbox import Policy, Sandbox
from sandbox.egress.libbpf import BpfMap
from sandbox.egress.service import Egress
from sandbox.errors import CapacityError, StartError
from sandbox.policy import Network

MAPS = ("allowed", "attached", "counts", "links")
OTHER_WEB = {"to": OTHER, "ports": [80]}
RULES = Network.model_validate({"destinations": [WEB, OTHER_WEB]})
NEW_RULES = Network.model_validate({"destinations": [{"to": HOST, "ports": [81]}, OTHER_WEB]})
# A map, and how many writes it takes.
NO_ROOM = (("allowed", 0), ("allowed", 1), ("attached", 0), ("links", 0))
FAR_IDS = 1 << 48  # of no cgroup
CALLS = (f"tcp('{HOST}', 80)", f"tcp('{HOST}', 81)", f"tcp('{OTHER}', 80)")


def failure(number: int) -> OSError:
    return OSError(number, f"write to the map: {os.strerror(number)}")


class Map:
    """One of the kernel's, and the keys in it. `room`: how many writes it takes until `error`."""

    def __init__(self, real: BpfMap) -> None:
        self._real, self.fd = real, real.fd
        self.keys: set[bytes] = set()
        self.room: int | None = None
        self.error: Exception = failure(errno.ENOSPC)

    def set(self, key: bytes, value: bytes) -> None:
        if self.room == 0:
            raise self.error
        self.room = self.room and self.room - 1
        self._real.set(key, value)
        self.keys.add(key)

    def get(self, key: bytes, num_bytes: int) -> bytes | None:
        return self._real.get(key, num_bytes)

    def remove(self, key: bytes) -> None:
        self._real.remove(key)
        self.keys.discard(key)


@pytest.fixture
def maps(egress: Egress, monkeypatch: pytest.MonkeyPatch) -> dict[str, Map]:
    """Of the fence. `attached` is not asked for keys: they go with their cgroup."""
    own = {name: Map(egress.fence._maps[name]) for name in MAPS}
    for name, each in own.items():
        monkeypatch.setitem(egress.fence._maps, name, each)
    return own


def keys_left(maps: dict[str, Map]) -> set[bytes]:
    return maps["allowed"].keys | maps["counts"].keys | maps["links"].keys


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, CapacityError), (errno.EPERM, StartError)])
@pytest.mark.parametrize("where", [*NO_ROOM, ("attached", 1), ("counts", 0)])
def test_a_map_that_takes_no_more_refuses_the_sandbox(connect, maps, where, number, kind):
    """And leaves no key of it; afterwards there is room for another."""
    own = maps[where[0]]
    own.room, own.error = where[1], failure(number)
    with pytest.raises(kind, match="connecting a sandbox to the network"):
        connect(policy=Policy(network=RULES))
    assert keys_left(maps) == set()
    own.room = None
    box = connect(policy=Policy(network=RULES))
    assert attempt(box, *CALLS)[0] == ["hello", "EPERM", "hello"]
    box.kill()
    assert keys_left(maps) == set()


def fill(counts, taken):
    for number in itertools.count(FAR_IDS):
        counts.set(struct.pack("=Q", number), bytes(32))
        taken.append(struct.pack("=Q", number))


def test_a_map_that_is_full_refuses_the_sandbox(connect, egress: Egress):
    """The kernel's own words."""
    counts, taken = egress.fence._maps["counts"], []
    try:
        with pytest.raises(OSError, match="full") as full:
            fill(counts, taken)
        assert full.value.errno == errno.ENOSPC
        with pytest.raises(CapacityError, match="counts: it is full"):
            connect(policy=Policy(network=RULES))
    finally:
        for key in taken:
            counts.remove(key)
    assert attempt(connect(policy=Policy(network=RULES)), *CALLS)[0] == ["hello", "EPERM", "hello"]


@pytest.mark.parametrize("error", [failure(errno.ENOSPC), MemoryError("no memory for an entry")])
@pytest.mark.parametrize(("name", "room"), NO_ROOM)
def test_a_map_that_takes_no_more_leaves_the_rules_that_hold(connect, maps, name, room, error):
    box: Sandbox = connect(policy=Policy(network=RULES))
    before = set(maps["allowed"].keys)
    maps[name].room, maps[name].error = room, error
    with pytest.raises((CapacityError, MemoryError)):
        box.set_network(NEW_RULES, 1)
    assert box.network_version == 1
    assert maps["allowed"].keys == before
    assert attempt(box, *CALLS)[0] == ["hello", "EPERM", "hello"]
    maps[name].room = None
    assert box.set_network(NEW_RULES, 1) == 2
    assert attempt(box, *CALLS)[0] == ["EPERM", "hello", "hello"]
    assert len(maps["allowed"].keys) == len(before)
