"""Networks of sandboxes where threads or memory are short, or version 6 is turned off and on: named errors,
nothing left, and all goes on once it is better."""

import errno
import os
from pathlib import Path

import pytest
from ordinary_user import User, user
from sandbox_internet import HOST, HOST_6, NAMESERVER, REACH, Internet, attempt, wait_until
from thread_shortage import run_short

from sandbox.egress import namespaces, rtnetlink
from sandbox.egress.service import Egress
from sandbox.errors import CapacityError
from sandbox.policy import presets

__all__ = ["user"]  # a fixture
BOTH = (f"tcp('{HOST}', 80)", f"tcp('{HOST_6}', 80)")


@pytest.fixture
def world():
    if os.geteuid() != 0:
        pytest.skip("a sandbox with a network needs root")
    world = Internet()
    yield world
    world.close()


def fds() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize("number", range(1, 7))
def test_a_want_of_threads_for_a_network_is_that_and_leaves_nothing(
    world: Internet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
):
    """Whichever of those that a first network starts is not to be had, and all after it."""
    left = [number]
    start = namespaces.TimelyThread.begin

    def begin(self: namespaces.TimelyThread) -> None:
        left[0] -= 1
        if left[0] == 0:
            run_short(monkeypatch, "none")
        start(self)

    monkeypatch.setattr(namespaces.TimelyThread, "begin", begin)
    before = fds()
    with pytest.raises(CapacityError, match="thread"):
        Egress(tmp_path, uplink=world.path, nameserver=NAMESERVER, num_spare=0)
    monkeypatch.undo()
    wait_until(lambda: world.devices() == ["lo"])
    assert fds() == before


def test_networked_sandboxes_end_where_there_are_no_threads(
    world: Internet, create, state_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    egress = Egress(state_dir, uplink=world.path, nameserver=NAMESERVER, num_spare=0)
    boxes = [create(policy=presets.open_internet(), egress=egress) for _ in range(3)]
    with monkeypatch.context() as patch:
        run_short(patch, "none")
        for box in boxes:
            box.kill()
    assert egress._trunk._taken == set()
    egress.close()
    assert world.devices() == ["lo"]


def test_a_link_that_the_kernel_did_not_remove_is_tried_again(
    world: Internet, create, state_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its address is nobody else's until then."""
    egress = Egress(state_dir, uplink=world.path, nameserver=NAMESERVER, num_spare=0)

    def refuse(self: rtnetlink.Routing, ifindex: int) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    with monkeypatch.context() as patch:
        patch.setattr(rtnetlink.Routing, "remove", refuse)
        create(policy=presets.open_internet(), egress=egress).kill()
    (late,) = egress._trunk._taken
    with create(policy=presets.open_internet(), egress=egress) as box:
        assert attempt(box, *BOTH)[0] == ["hello", "hello"]
        (now,) = egress._trunk._taken
        assert now.number != late.number
    egress.close()
    assert world.devices() == ["lo"]


def test_version_6_that_was_turned_off_and_on_again_leads_to_sandboxes_of_before_and_of_later(
    world: Internet, create, state_dir: Path
):
    egress = Egress(state_dir, uplink=world.path, nameserver=NAMESERVER, num_spare=0)
    with create(policy=presets.open_internet(), egress=egress) as box:
        assert attempt(box, *BOTH)[0] == ["hello", "hello"]
        namespaces.run_in(world.namespace, lambda: turn_version_6("1"))
        namespaces.run_in(world.namespace, lambda: turn_version_6("0"))
        namespaces.configure(world.namespace, [f"route add local {HOST_6}/128 dev lo"])
        wait_until(lambda: attempt(box, *BOTH)[0] == ["hello", "hello"])
        with create(policy=presets.open_internet(), egress=egress) as later:
            assert attempt(later, *BOTH)[0] == ["hello", "hello"]
    egress.close()
    assert world.devices() == ["lo"]


def test_a_machine_with_version_6_turned_off_has_sandboxes_with_a_network(
    world: Internet, create, state_dir: Path
):
    namespaces.run_in(world.namespace, lambda: turn_version_6("1"))
    egress = Egress(state_dir, uplink=world.path, nameserver=NAMESERVER, num_spare=0)
    with create(policy=presets.open_internet(), egress=egress) as box:
        assert attempt(box, BOTH[0])[0] == ["hello"]
    egress.close()


SCRIPT = """
import json, sys
from pathlib import Path
from sandbox import Sandbox
from sandbox.policy.presets import open_internet
state, toolkit, reach, call = sys.argv[1:]
with Sandbox.create(policy=open_internet(), state_dir=Path(state), toolkit=toolkit) as box:
    print(json.dumps(box.commands.run(["python3", "-c", reach, call]).stdout.split()))
"""


def test_an_ordinary_users_sandbox_has_one_there_too(user: User, world: Internet):
    namespaces.run_in(world.namespace, lambda: turn_version_6("1"))
    with user.helped(inside=world):
        assert user.run(SCRIPT, REACH, BOTH[0], inside=world) == ["hello"]


def turn_version_6(off: str) -> None:
    for name in ("all", "default"):
        Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6").write_text(off)
