"""Where an owner starts its sandboxes from: what it keeps, and what becomes of all when it goes."""

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from sandbox import Sandbox
from sandbox.audit import check_integrity, sweep
from sandbox.errors import CapacityError, StartError
from sandbox.journal import Journal
from sandbox.nursery import Nursery, _Verb, shared_nursery
from sandbox.places import INIT_BINARY
from sandbox.processes import find_process

PATIENCE_S = 30.0
FIRST_LAYER = 32  # LAYERS_FROM of native/nursery.c: a launch has no descriptor from there on
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="substrate 'container' needs root")


def num_fds(nursery: Nursery) -> int:
    return len(list(Path(f"/proc/{nursery.pid}/fd").iterdir()))


def children(nursery: Nursery) -> list[str]:
    return Path(f"/proc/{nursery.pid}/task/{nursery.pid}/children").read_text().split()


def wait_until_gone(pid: int) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while (found := find_process(pid)) is not None and found.is_alive():
        assert time.monotonic() < give_up_s, f"{pid} lives"
        time.sleep(0.01)


def wait_until_childless(nursery: Nursery) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while left := children(nursery):
        assert time.monotonic() < give_up_s, left
        time.sleep(0.01)


def test_sandboxes_made_at_once_leave_nothing_in_it(create, substrate: str):
    nursery = shared_nursery(INIT_BINARY)
    create(substrate=substrate).kill()  # it has begun
    before = num_fds(nursery)
    with ThreadPoolExecutor(6) as pool:
        boxes = list(pool.map(lambda _: create(substrate=substrate), range(12)))
        assert all(each.ok for each in pool.map(lambda box: box.commands.run("true"), boxes))
        assert len(children(nursery)) == 12
        list(pool.map(Sandbox.kill, boxes))
    assert (num_fds(nursery), children(nursery)) == (before, [])


@needs_root
def test_a_layer_is_found_there_for_as_long_as_its_sandbox_lives(create):
    nursery = shared_nursery(INIT_BINARY)
    create(substrate="container").kill()
    before = num_fds(nursery)
    box = create(substrate="container")
    box.files.write("kept", b"content")
    assert num_fds(nursery) == before + 1
    assert max(int(each.name) for each in Path(f"/proc/{nursery.pid}/fd").iterdir()) >= FIRST_LAYER
    layer = box._made.launched.open_layer()
    assert Path(f"/proc/self/fd/{layer}/workspace/kept").read_bytes() == b"content"
    os.close(layer)
    box.kill()
    assert num_fds(nursery) == before
    with pytest.raises(OSError, match="No such file"):
        box._made.launched.open_layer()


def test_a_launch_takes_nothing_of_the_nursery_away():
    """Its table of descriptors is the nursery's until it has left the layers, wherever it ends."""
    nursery = Nursery(INIT_BINARY)
    errors, ignored = os.memfd_create("errors"), os.memfd_create("ignored")
    nursery.start("sbx-x", ["--first"], (ignored,), None).kill()  # it has begun
    wait_until_childless(nursery)
    before = num_fds(nursery)
    for number in range(20):
        nursery.start("sbx-x", ["--killed"], (ignored,), None).kill()
        launcher = nursery.start("sbx-x", [f"--what-{number}"], (errors,), None)
        wait_until_gone(launcher.pid)
        launcher.kill()
        launcher.wait(PATIENCE_S)
    said = os.pread(errors, 1 << 16, 0).decode().splitlines()
    os.close(errors)
    os.close(ignored)
    assert said == [f"dockyard-init: unknown option --what-{each}: Invalid argument" for each in range(20)]
    wait_until_childless(nursery)
    assert num_fds(nursery) == before
    nursery.close()
    wait_until_gone(nursery.pid)


def test_a_launch_that_fails_says_why_and_leaves_nothing(state_dir: Path):
    nursery = Nursery(INIT_BINARY)
    errors = os.memfd_create("errors")
    launcher = nursery.start("sbx-x", ["--what", "--", "/bin/true"], (errors,), None)
    with pytest.raises(TimeoutError):  # nobody has said that this is all
        launcher.wait(0.2)
    launcher.kill()
    launcher.wait(PATIENCE_S)
    assert os.pread(errors, 4096, 0) == b"dockyard-init: unknown option --what: Invalid argument\n"
    os.close(errors)
    assert children(nursery) == []
    errors = os.memfd_create("errors")
    many = [*["--no-network"] * 20_000, "--last"]  # 260 kB, which no packet has room for
    launcher = nursery.start("sbx-x", many, (errors,), None)
    wait_until_gone(launcher.pid)
    assert os.pread(errors, 4096, 0) == b"dockyard-init: unknown option --last: Invalid argument\n"
    launcher.kill()
    launcher.wait(PATIENCE_S)
    os.close(errors)
    with pytest.raises(OSError, match="start a launcher"):
        nursery.start("sbx-x", ["--", "x"], (0,), 0)  # no cgroup
    nursery.close()
    wait_until_gone(nursery.pid)


def test_when_it_is_killed_sandboxes_run_on_and_the_next_begins_in_another(
    create, substrate: str, state_dir: Path
):
    nursery = shared_nursery(INIT_BINARY)
    box = create(substrate=substrate)
    os.kill(nursery.pid, signal.SIGKILL)
    wait_until_gone(nursery.pid)
    assert box.commands.run("echo alive").stdout == "alive\n"
    give_up_s = time.monotonic() + PATIENCE_S
    while not nursery.is_gone():
        assert time.monotonic() < give_up_s
        time.sleep(0.01)
    with pytest.raises(OSError, match="has ended"):
        nursery.start("sbx-x", ["--", "x"], (0,), None)
    other = create(substrate=substrate)
    assert shared_nursery(INIT_BINARY).pid != nursery.pid
    assert other.commands.run("echo too").stdout == "too\n"
    box.kill()
    assert [each for each in check_integrity(state_dir).leftovers if each.sandbox_id == box.id] == []


def test_one_that_is_stopped_is_waited_for_so_long(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sandbox.nursery._PATIENCE_S", 0.1)
    monkeypatch.setattr("sandbox.nursery._SEND_PATIENCE_S", 0.1)
    nursery = Nursery(INIT_BINARY)
    ignored = os.memfd_create("ignored")
    os.kill(nursery.pid, signal.SIGSTOP)
    with pytest.raises(OSError, match=f"kill -CONT {nursery.pid}"):
        nursery.start("sbx-x", ["--what"], (ignored,), None)
    with suppress(BlockingIOError):
        while True:  # until no more fits
            nursery._socket.send(b"x", socket.MSG_DONTWAIT)
    nursery.tell(_Verb.END, 1)  # which does not wait for good either
    with pytest.raises(OSError, match=f"kill -CONT {nursery.pid}"):
        nursery.start("sbx-x", ["--what"], (ignored,), None)
    os.kill(nursery.pid, signal.SIGCONT)  # and ends, for what was sent is no request
    os.close(ignored)
    wait_until_gone(nursery.pid)


def test_a_program_that_is_not_there_is_a_start_error(tmp_path: Path):
    with pytest.raises(StartError, match="process that starts sandboxes"):
        shared_nursery(tmp_path / "none")


def test_without_a_thread_for_its_answers_it_is_a_shortage_and_ends(
    toolkit: Path, shortage: pytest.MonkeyPatch
):
    def own() -> tuple[int, set[str]]:
        tasks = Path("/proc/self/task").glob("*/children")
        return len(list(Path("/proc/self/fd").iterdir())), {
            pid for at in tasks for pid in at.read_text().split()
        }

    shortage.setattr("sandbox.nursery._shared", {})
    before = own()
    for _ in range(2):
        with pytest.raises(CapacityError, match="the process that starts sandboxes"):
            shared_nursery(INIT_BINARY)
        assert own() == before


def test_it_is_heard_again_when_there_is_memory(toolkit: Path, monkeypatch: pytest.MonkeyPatch):
    errors = [MemoryError(), OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), MemoryError()]
    receive = Nursery._receive

    def receive_later(nursery: Nursery) -> object:
        if errors:
            raise errors.pop()
        return receive(nursery)

    monkeypatch.setattr(Nursery, "_receive", receive_later)
    nursery = Nursery(INIT_BINARY)
    ignored = os.memfd_create("ignored")
    launcher = nursery.start("sbx-x", ["--what"], (ignored,), None)
    launcher.kill()
    launcher.wait(PATIENCE_S)
    assert (errors, nursery.is_gone()) == ([], False)
    os.close(ignored)
    nursery.close()
    wait_until_gone(nursery.pid)


@pytest.mark.parametrize("error", [OSError(errno.EBADF, os.strerror(errno.EBADF)), LookupError()])
def test_one_that_can_be_heard_no_more_is_followed_by_another(
    toolkit: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    seen: list[BaseException | None] = []
    receive, is_broken = Nursery._receive, threading.Event()

    def receive_or_fail(nursery: Nursery) -> object:
        received = receive(nursery)
        if is_broken.is_set() and nursery is broken:
            raise error
        return received

    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_value))
    monkeypatch.setattr("sandbox.nursery._shared", {})
    monkeypatch.setattr(Nursery, "_receive", receive_or_fail)
    broken = shared_nursery(INIT_BINARY)
    is_broken.set()
    ignored = os.memfd_create("ignored")
    with pytest.raises(OSError, match="has ended"):
        broken.start("sbx-x", ["--what"], (ignored,), None)
    assert (seen, broken.is_gone()) == ([error], True)
    other = shared_nursery(INIT_BINARY)
    launcher = other.start("sbx-x", ["--what"], (ignored,), None)
    launcher.kill()
    launcher.wait(PATIENCE_S)
    other.close()
    os.close(ignored)
    for each in (broken, other):
        wait_until_gone(each.pid)


def test_it_ends_with_its_owner(toolkit: Path, tmp_path: Path):
    script = (
        "import sys; from pathlib import Path; from sandbox import Sandbox\n"
        "from sandbox.nursery import shared_nursery; from sandbox.places import INIT_BINARY\n"
        "box = Sandbox.create(state_dir=sys.argv[1], toolkit=sys.argv[2])\n"
        "print(shared_nursery(INIT_BINARY).pid, box._made.launched.init_pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    words = [sys.executable, "-c", script, str(tmp_path / "state"), str(toolkit)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pids = list(map(int, owner.stdout.readline().split()))
        owner.kill()
    for pid in pids:
        wait_until_gone(pid)
    sweep(tmp_path / "state")
    assert check_integrity(tmp_path / "state").is_clean


def test_a_forked_child_has_one_of_its_own(create, state_dir: Path, toolkit: Path):
    """And the parent's answers stay the parent's."""
    box = create()
    parents = shared_nursery(INIT_BINARY)
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            with Sandbox.create(state_dir=state_dir, toolkit=toolkit) as own:
                said = own.commands.run("echo child").stdout
            os.write(writer, f"{shared_nursery(INIT_BINARY).pid} {parents.is_gone()} {said}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as said:
        pid, is_gone, words = said.read().split()
    os.waitpid(child, 0)
    assert (int(pid) != parents.pid, is_gone, words) == (True, "True", "child")
    assert box.commands.run("echo parent").stdout == "parent\n"
    assert create().commands.run("echo parent").stdout == "parent\n"


def test_what_cannot_be_given_back_is_nobodys_and_the_rest_is_given_back(
    toolkit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A group that the kernel holds on to, once."""
    state_dir = tmp_path / "state"
    box = Sandbox.create(state_dir=state_dir, toolkit=toolkit)
    remove = box._ownership.groups.remove

    def refuse() -> None:
        monkeypatch.setattr(box._ownership.groups, "remove", remove)
        raise CapacityError("the kernel holds on to it")

    monkeypatch.setattr(box._ownership.groups, "remove", refuse)
    with pytest.raises(CapacityError, match="holds on"):
        box.kill()
    audit = check_integrity(state_dir)
    assert audit.live == ()
    assert {each.kind for each in audit.leftovers} >= {"record"}
    assert {each.sandbox_id for each in audit.leftovers} == {box.id}
    sweep(state_dir)
    assert Journal(state_dir).find(box.id) is None
