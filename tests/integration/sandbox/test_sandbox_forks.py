"""A child of a fork has its parent's objects and none of its sandboxes: it says so, keeps none alive, and
makes its own."""

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from sandbox_internet import Internet, wait_until

from sandbox import Sandbox
from sandbox.audit import sweep
from sandbox.errors import UnsupportedError
from sandbox.forks import leave_in_children
from sandbox.journal import Journal
from sandbox.layers.choice import choose, drain

REPOSITORY = Path(__file__).parents[3]
KEEP = """
import os, signal, sys
from sandbox import Sandbox
state, toolkit = sys.argv[1:]
box = Sandbox.create(state_dir=state, toolkit=toolkit, env={"A": "1"})
running = [box.commands.start("sleep 1000", stdin=None), box.commands.start("cat", stdin="x" * 1_000_000)]
if os.fork() == 0:
    print("forked", flush=True)
    signal.pause()
signal.pause()
"""


def test_no_sandbox_outlives_its_owner_with_what_that_has_forked(tmp_path: Path, toolkit: Path):
    words = [sys.executable, "-c", KEEP, str(tmp_path), str(toolkit)]
    with subprocess.Popen(words, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, process_group=0) as owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline() == "forked\n"
            (record,) = Journal(tmp_path).records()
            init = os.pidfd_open(record.processes[-1].pid)
            owner.send_signal(signal.SIGKILL)
            assert _ends(init), "init lives on, as the child of its owner does"
        finally:
            os.killpg(owner.pid, signal.SIGKILL)
    sweep(tmp_path)


def _ends(pidfd: int) -> bool:
    ready, _, _ = select.select([pidfd], [], [], 20)
    os.close(pidfd)
    return bool(ready)


ASK = """
import os, sys, threading
from sandbox import Sandbox, sandboxes
from sandbox.errors import SandboxGone
state, toolkit = sys.argv[1:]

def refused(call):
    try:
        call()
    except SandboxGone as gone:
        assert gone.reason == "forked" and "that this one was forked from" in gone.message, gone
        return True
    return False

box = Sandbox.create(state_dir=state, toolkit=toolkit, key="k1")
session, running = box.sessions.create(), box.commands.start("cat", stdin=None)
paused = Sandbox.create(state_dir=state, toolkit=toolkit)
paused.pause()
if (child := os.fork()) == 0:
    calls = (
        lambda: box.commands.run("true", timeout_s=2), lambda: session.run("true"), running.wait,
        lambda: box.files.read("/etc/passwd"), box.get_info, box.pause, box.snapshot, box.fork_fs,
        lambda: box.set_timeout(1), lambda: box.set_network("none", 1), paused.resume,
    )
    print([call for call in calls if not refused(call)], box.is_running, box.commands.list())
    running.send_stdin("from the child")
    running.kill(), box.kill(), paused.kill()
    with Sandbox.create(state_dir=state, toolkit=toolkit, key="k1") as own:
        print(own.id != box.id, own.commands.run("echo own").stdout, end="")
    print(sandboxes.attach(box.id, state_dir=state).commands.run("echo asked").stdout, end="", flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(paused.is_paused, Sandbox.create(state_dir=state, toolkit=toolkit, key="k1") is box)
running.send_stdin("from the parent")
running.close_stdin()
print(running.wait(20).stdout)
box.kill(), paused.kill()
"""


def test_what_a_child_has_of_its_parents_says_whose_it_is(tmp_path: Path, toolkit: Path):
    words = [sys.executable, "-c", ASK, str(tmp_path), str(toolkit)]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == [
        "[] False ()", "True own", "asked", "True True", "from the parent",
    ], done.stderr  # fmt: skip


READY = """
import os, sys
from sandbox import Sandbox
from sandbox.layers.choice import MECHANISMS
state, toolkit = sys.argv[1:]

def create():
    return Sandbox.create(state_dir=state, toolkit=toolkit, layer="image")

create().kill()
for pool in MECHANISMS["image"]._pools.values():
    pool.wait()
    assert pool.num_ready() == 1
(ours, theirs), (go, went) = os.pipe(), os.pipe()
if (child := os.fork()) == 0:
    with create() as box:
        box.files.write("secret", "the child's")
        os.write(theirs, b"x"), os.read(go, 1)
    os._exit(0)
os.read(ours, 1)
with create() as box:
    print([each.name for each in box.files.list()])
os.write(went, b"x")
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_child_has_layers_of_its_own(tmp_path: Path, toolkit: Path):
    try:
        choose("image", tmp_path)
    except UnsupportedError as error:
        pytest.skip(str(error))
    drain()
    words = [sys.executable, "-c", READY, str(tmp_path), str(toolkit)]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


TRY = "import socket; socket.socket().connect_ex(('192.0.2.1', 80))"


def test_a_child_waits_for_no_reader_of_refusals(connect: Callable[..., Sandbox]):
    box = connect()
    (denied,) = box.commands.run(["python3", "-c", TRY]).denials
    connection = box._ownership.connection
    assert connection is not None
    is_held, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with connection._lock, connection.refusals._lock, connection._services.fence._lock:
            is_held.set()
            may_end.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    is_held.wait()
    if (child := os.fork()) == 0:
        signal.alarm(20)
        os._exit(0 if box.denials == (denied,) and box.network_version == 1 else 1)
    may_end.set()
    holder.join()
    assert os.waitpid(child, 0)[1] == 0
    box.commands.run(["python3", "-c", TRY])
    assert [each.count for each in box.denials] == [2]


NETWORKED = """
import os, signal, sys
from pathlib import Path
from sandbox import Sandbox
from sandbox.egress.service import Egress
from sandbox.errors import InvalidArgument
from sandbox.policy.presets import open_internet
state, toolkit, uplink = map(Path, sys.argv[1:])
egress = Egress(state, uplink=uplink, num_spare=1)
egress.fill()

def create():
    return Sandbox.create(policy=open_internet(), egress=egress, state_dir=state, toolkit=toolkit)

TRY = "import socket; print(socket.create_connection(('2001:db8::7', 80), 5).recv(5))"
box = create()
if (child := os.fork()) == 0:
    signal.alarm(30)
    try:
        create()
    except InvalidArgument as error:
        said = str(error)
    egress.close()
    assert "a fork of" in said, said
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
for each in (box, create(), create()):
    assert each.commands.run(["python3", "-c", TRY]).stdout == "b'hello'\\n"
if os.fork() == 0:
    print("forked", flush=True)
    signal.pause()
signal.pause()
"""


def test_a_network_of_the_parents_is_no_childs_and_ends_with_the_parent(
    internet: Internet, tmp_path: Path, toolkit: Path
):
    uplink = f"/proc/{os.getpid()}/fd/{internet.namespace}"
    words = [sys.executable, "-c", NETWORKED, str(tmp_path), str(toolkit), uplink]
    with subprocess.Popen(words, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, process_group=0) as owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline() == "forked\n"
            owner.send_signal(signal.SIGKILL)
            wait_until(lambda: internet.devices() == ["lo"])
        finally:
            os.killpg(owner.pid, signal.SIGKILL)
    sweep(tmp_path)


def test_what_one_heirloom_raises_keeps_no_other(capfd: pytest.CaptureFixture[str]):
    class Broken:
        def leave(self) -> None:
            raise OSError("it was being closed")

    class Whole:
        has_left = False

        def leave(self) -> None:
            self.has_left = True

    broken, whole = Broken(), Whole()
    leave_in_children(broken)
    leave_in_children(whole)
    if (child := os.fork()) == 0:
        os._exit(0 if whole.has_left else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert "it was being closed" in capfd.readouterr().err
