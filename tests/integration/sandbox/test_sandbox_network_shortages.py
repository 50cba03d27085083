"""Networks of sandboxes where threads or memory are short, or version 6 is turned off and on: named errors,
nothing left, and all goes on once it is better."""

import errno
import os
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import pytest
from ordinary_user import User, user
from sandbox_internet import HOST, HOST_6, NAMESERVER, REACH, Internet, attempt, wait_until
from thread_shortage import run_short

from sandbox.egress import namespaces, rtnetlink
from sandbox.egress.connection import Connection
from sandbox.egress.fence import Fence
from sandbox.egress.service import Egress
from sandbox.egress.trunk import Trunk
from sandbox.errors import CapacityError, StartError
from sandbox.policy import presets
from sandbox.privileged.addresses import Addresses

__all__ = ["user"]  # a fixture
BOTH = (f"tcp('{HOST}', 80)", f"tcp('{HOST_6}', 80)")


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
    assert not egress._trunk._taken
    egress.close()
    assert world.devices() == ["lo"]


@pytest.mark.parametrize("error", [MemoryError("no memory"), OSError(errno.ENOMEM, "no memory")])
def test_a_link_that_the_kernel_did_not_remove_is_tried_again(
    world: Internet, create, state_dir: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    """Its address is nobody else's until then, nor is it forgotten where the next try fails, too."""
    egress = Egress(state_dir, uplink=world.path, nameserver=NAMESERVER, num_spare=0)

    def refuse(self: rtnetlink.Routing, ifindex: int) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(rtnetlink.Routing, "remove", refuse)
        for _ in range(3):
            create(policy=presets.open_internet(), egress=egress).kill()
    late = {each.number for each in egress._trunk._taken}
    assert len(late) == 3
    with create(policy=presets.open_internet(), egress=egress) as box:
        assert attempt(box, *BOTH)[0] == ["hello", "hello"]
        (now,) = egress._trunk._taken
        assert now.number not in late
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


def test_version_6_that_goes_before_the_first_sandbox_is_there_for_it(
    world: Internet, create, state_dir: Path
):
    egress = Egress(state_dir, uplink=world.path, nameserver=NAMESERVER, num_spare=0)
    namespaces.run_in(world.namespace, lambda: turn_version_6("1"))
    with create(policy=presets.open_internet(), egress=egress) as box:
        assert attempt(box, BOTH[0])[0] == ["hello"]
        namespaces.run_in(world.namespace, lambda: turn_version_6("0"))
        namespaces.configure(world.namespace, [f"route add local {HOST_6}/128 dev lo"])
        wait_until(lambda: attempt(box, *BOTH)[0] == ["hello", "hello"])
        end = box._ownership.connection.link.name
        switch = Path(f"/proc/sys/net/ipv6/conf/{end}/disable_ipv6")
        wait_until(lambda: namespaces.run_in(world.namespace, switch.read_text) == "1\n")
    egress.close()


def test_a_renewal_that_fails_half_way_is_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if os.geteuid() != 0:
        pytest.skip("makes network namespaces")
    uplink = namespaces.new_namespace()
    namespaces.configure(uplink, ["link set lo up"])
    with closing(Trunk(uplink, "test", lambda _: None)) as trunk:
        for _ in range(100):
            trunk.take()
        before = namespaces.run_in(uplink, routes)
        namespaces.run_in(uplink, lambda: turn_version_6("1"))
        namespaces.run_in(uplink, lambda: turn_version_6("0"))
        with monkeypatch.context() as patch:
            patch.setattr(trunk, "_route", refuse)
            with pytest.raises(OSError, match="no memory"):
                namespaces.run_in(uplink, trunk.renew)
        namespaces.run_in(uplink, trunk.renew)
        assert namespaces.run_in(uplink, routes) == before
        assert len(before) == 3  # two blocks, and the neighbour
    os.close(uplink)


def test_a_renewal_that_fails_is_tried_again_until_it_does_not(
    world: Internet,
    create,
    state_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """Though no other address changes; and what is not known is not said."""
    egress = Egress(state_dir, uplink=world.path, nameserver=NAMESERVER, num_spare=0)
    turn_on, failed, is_short = Trunk._turn_on, list[Trunk](), [True]

    def turn_on_or_fail(self: Trunk) -> None:
        if is_short:
            failed.append(self)
            raise OSError(errno.EMFILE, "no descriptor")
        turn_on(self)

    with create(policy=presets.open_internet(), egress=egress) as box:
        monkeypatch.setattr(Trunk, "_turn_on", turn_on_or_fail)
        namespaces.run_in(world.namespace, lambda: turn_version_6("1"))
        namespaces.run_in(world.namespace, lambda: turn_version_6("0"))
        namespaces.configure(world.namespace, [f"route add local {HOST_6}/128 dev lo"])
        wait_until(lambda: len(failed) > 20)
        is_short.clear()
        wait_until(lambda: attempt(box, *BOTH)[0] == ["hello", "hello"])
        assert not egress.resolver._again
    said = [each.getMessage() for each in caplog.records if "version 6" in each.getMessage()]
    assert len(said) == 1
    assert "could not be looked at" in said[0]
    egress.close()


def routes() -> list[str]:
    words = ("route show", "neighbour show")
    found = [subprocess.check_output(["ip", "-6", *each.split()], text=True) for each in words]
    return sorted(line for line in "".join(found).splitlines() if "fe80::1 " in line)


def refuse(*_: object) -> NoReturn:
    raise OSError(errno.ENOMEM, "no memory")


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOBUFS, "no memory"), ValueError("odd")])
def test_who_cannot_tell_what_is_the_machines_lets_nothing_through(
    world: Internet, create, state_dir: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    """Whatever the reason; and the thread that has met it goes on."""

    def fail(_: Addresses) -> NoReturn:
        raise error

    egress = Egress(state_dir, uplink=world.path, nameserver=NAMESERVER, num_spare=0)
    with create(policy=presets.open_internet(), egress=egress) as box:
        assert attempt(box, BOTH[0])[0] == ["hello"]
        monkeypatch.setattr(Addresses, "current", fail)
        namespaces.configure(world.namespace, ["address add 198.51.100.9/32 dev lo"])
        wait_until(lambda: attempt(box, BOTH[0], "tcp('198.51.100.9', 6379)")[0] == ["EPERM", "EPERM"])
        assert egress.resolver._do(lambda: None)
    egress.close()


def test_a_sandbox_whose_rules_find_no_memory_is_shut_and_the_others_follow(
    world: Internet, create, state_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    egress = Egress(state_dir, uplink=world.path, nameserver=NAMESERVER, num_spare=0)
    boxes = [create(policy=presets.open_internet(), egress=egress) for _ in range(2)]
    put, failed = Connection._put, list[str]()

    def put_or_fail(self: Connection, *rest: Any) -> None:
        if self.name == boxes[0].id:
            failed.append(self.name)
            raise MemoryError("no memory for rules")
        put(self, *rest)

    monkeypatch.setattr(Connection, "_put", put_or_fail)
    calls = (BOTH[0], "tcp('198.51.100.9', 80)")
    namespaces.configure(world.namespace, ["address add 198.51.100.9/32 dev lo"])
    wait_until(lambda: attempt(boxes[0], *calls)[0] == ["EPERM", "EPERM"])
    wait_until(lambda: attempt(boxes[1], *calls)[0] == ["hello", "EPERM"])
    assert failed
    for box in boxes:
        box.kill()
    egress.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_who_is_followed_by_nobody_any_more_reaches_nothing(
    world: Internet, create, state_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    """Where the resolver's thread ends, though one sandbox cannot be shut at first."""
    egress = Egress(state_dir, uplink=world.path, nameserver=NAMESERVER, num_spare=0)
    boxes = [create(policy=presets.open_internet(), egress=egress) for _ in range(2)]
    shut_off, failed = Fence._shut_off, list[int]()

    def shut_off_or_fail(self: Fence, sandbox: int) -> None:
        if len(failed) < 3:
            failed.append(sandbox)
            raise MemoryError("no memory")
        shut_off(self, sandbox)

    def end() -> NoReturn:
        raise SystemExit

    monkeypatch.setattr(Fence, "_shut_off", shut_off_or_fail)
    reader, writer = os.pipe()
    egress.resolver.watch(reader, end)
    os.write(writer, b"x")
    egress.resolver._thread.join(10)
    assert [attempt(box, BOTH[0])[0] for box in boxes] == [["EPERM"], ["EPERM"]]
    assert len(failed) == 3
    with pytest.raises(StartError, match="the fence is shut"):
        create(policy=presets.open_internet(), egress=egress)
    for box in boxes:
        box.kill()
    egress.close()
    assert world.devices() == ["lo"]
    os.close(reader)
    os.close(writer)


def test_helped_networks_are_shut_while_refusals_are_read(user: User, world: Internet):
    """Each holds one lock and takes the other's, in the order of the other."""
    with user.helped(inside=world):
        assert user.run(SHUT, inside=world) == "shut"


SHUT = """
import json, sys, threading, time
from pathlib import Path
from sandbox import Sandbox
from sandbox.egress.helped import HelpedEgress
from sandbox.helper import shared_helper
from sandbox.policy.presets import open_internet
state, toolkit = sys.argv[1:]
egress = HelpedEgress(shared_helper(Path(state)))
with Sandbox.create(policy=open_internet(), egress=egress, state_dir=Path(state), toolkit=toolkit) as box:
    fence, is_held, may_go = egress.fence, threading.Event(), threading.Event()

    def read():
        with fence._lock:  # as `drain`, which hands a refusal on
            is_held.set()
            may_go.wait(20)
            egress._on_refusal(0, None)

    def fail():
        may_go.set()
        time.sleep(0.2)
        raise MemoryError("no memory")

    threads = [threading.Thread(target=read, daemon=True)]
    threads[0].start()
    is_held.wait()
    egress._addresses.current = fail
    threads.append(threading.Thread(target=egress._on_new_addresses, daemon=True))
    threads[1].start()
    for each in threads:
        each.join(20)
    print(json.dumps("shut" if fence._is_shut and not any(each.is_alive() for each in threads) else "stuck"))
"""


def test_a_helped_network_whose_refusals_cannot_be_read_is_made_anew(user: User, world: Internet):
    with user.helped(inside=world):
        assert user.run(UNREAD, inside=world) == [True, True]


UNREAD = """
import errno, json, sys
from pathlib import Path
from sandbox import Sandbox
from sandbox.egress.helped import HelpedEgress
from sandbox.errors import CapacityError
from sandbox.helper import shared_helper
from sandbox.policy.presets import open_internet
state, toolkit = sys.argv[1:]
egress = HelpedEgress(shared_helper(Path(state)))
def create():
    return Sandbox.create(policy=open_internet(), egress=egress, state_dir=Path(state), toolkit=toolkit)
def fail(fd, on_ready):
    raise OSError(errno.ENOMEM, "no memory")
egress.resolver.watch = fail
try:
    create()
except CapacityError as error:
    said = "no memory" in error.message
del egress.resolver.watch
with create():
    is_read = egress.fence.log_fileno() in egress.resolver._selector.get_map()
print(json.dumps([said, is_read]))
"""


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
