"""Nothing of a command outlives it, and none ends another: daemons, minders killed or stopped, init."""

import os
import subprocess
from pathlib import Path

import pytest
from sandbox_processes import children, processes, uid_of

from sandbox import Sandbox
from sandbox.errors import FileError, SandboxError
from sandbox.journal import Journal

DAEMONISE = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3):
            os.close(fd)
        open("/tmp/daemon", "w").write(str(os.getpid()))
        time.sleep(1000)
    os._exit(0)
while not os.path.exists("/tmp/daemon"):
    time.sleep(0.01)
"""


def test_a_daemonised_child_does_not_survive_its_command(box: Sandbox):
    result = box.commands.run(["python3", "-c", DAEMONISE])
    assert result.ok
    assert box.files.read("/tmp/daemon") != b""
    assert processes(box) == []


# Its first thread leaves by the system call for one thread, so that the process is a zombie which writes on.
HEADLESS = """
import ctypes, os, threading, time
if os.fork():
    while not os.path.exists("ticks"):
        time.sleep(0.01)
    WAIT
os.setsid()
def tick():
    while True:
        with open("ticks", "a") as file:
            file.write(".")
        time.sleep(0.01)
def wait_for_the_zombie():
    while ") Z " not in open("/proc/self/stat").read():
        time.sleep(0.001)
    tick()
threading.Thread(target=wait_for_the_zombie).start()
ctypes.CDLL(None).syscall(60, 0)
"""


@pytest.mark.parametrize(("wait", "reason"), [("os._exit(0)", "exit"), ("time.sleep(1000)", "timeout")])
def test_a_process_without_its_first_thread_does_not_survive_its_command(
    box: Sandbox, wait: str, reason: str
):
    result = box.commands.run(["python3", "-c", HEADLESS.replace("WAIT", wait)], timeout_s=3)
    assert (result.reason, result.stderr) == (reason, "")
    first = box.files.read("ticks")
    box.commands.run("sleep 0.2")
    assert box.files.read("ticks") == first != b""


def test_a_minder_that_cannot_look_leaves_its_command_to_init(create, state_dir: Path):
    if os.geteuid() != 0:
        pytest.skip("another user's limits are root's to set")
    box = create(substrate="container")
    command = box.commands.start("setsid sleep 1001 & touch ready; until [ -e go ]; do sleep 0.01; done")
    box.commands.run("until [ -e ready ]; do sleep 0.01; done")
    (record,) = Journal(state_dir).records()
    minder, *_ = children(record.processes[-1].pid)
    owner = uid_of(minder)
    words = ["prlimit", f"--pid={minder}", "--nofile=0:0"]
    subprocess.run(words, user=owner, group=owner, extra_groups=[], check=True)  # root may lack the power
    box.files.write("go", b"")
    result = command.wait(60)
    assert (result.reason, result.exit_code) == ("signal", 137)
    assert processes(box) == []


def test_a_command_that_takes_inits_descriptors_leaves_nobody_waiting(box: Sandbox):
    """It has the same uid, so it may."""
    other = box.commands.start("sleep 1000")
    result = box.commands.run("prlimit --pid=1 --nofile=0:0 && prlimit --pid=$PPID --nofile=0:0")
    if result.exit_code == 0:
        for _ in range(2):
            with pytest.raises(SandboxError, match="Too many open files"):
                box.commands.run("true", timeout_s=30)
        with pytest.raises(FileError, match="Too many open files"):
            box.files.read("/etc/passwd")
    other.kill()
    assert other.wait(30).reason == "killed"


def test_a_command_that_kills_its_minder_takes_its_children_with_it(box: Sandbox):
    result = box.commands.run("(setsid sleep 1001 &) ; kill -9 $PPID; sleep 1002")
    assert (result.reason, result.exit_code) == ("signal", 137)
    assert processes(box) == []
    assert box.commands.run("echo alive").stdout == "alive\n"


# Stops the minder once, or as fast as it can be continued.
STOPPER = """
import os, sys, time
minder = os.getppid()
for _ in range(int(sys.argv[1])):
    os.kill(minder, 19)
    os.kill(minder, 18)
os.kill(minder, 19)
time.sleep(1000)
"""


@pytest.mark.parametrize("times", ["0", "100000"])
def test_a_command_that_stops_its_minder_ends_at_once_by_its_own_doing(box: Sandbox, times: str):
    result = box.commands.run(["python3", "-c", STOPPER, times], timeout_s=60)
    assert (result.reason, result.exit_code) == ("signal", 137)
    assert "was killed or stopped" in result.stderr
    assert processes(box) == []


def test_a_command_that_stops_anothers_minder_does_not_break_the_sandbox(box: Sandbox):
    other = box.commands.start("echo $PPID > minder; sleep 1001")
    box.commands.run("until [ -s minder ]; do sleep 0.01; done; kill -STOP $(cat minder)")
    assert other.wait(60).reason == "signal"
    assert box.commands.run("echo alive").stdout == "alive\n"


def test_one_command_cannot_take_anothers_processes_with_it(box: Sandbox):
    other = box.commands.start("(setsid sleep 1001 &) ; sleep 1002")
    box.commands.run("(setsid sleep 1003 &) ; kill -9 $PPID")
    box.commands.run("sleep 1000", timeout_s=0.2)
    assert {line.split()[-1] for line in processes(box) if line.startswith("sleep")} <= {"1001", "1002"}
    with pytest.raises(TimeoutError):
        other.wait(0)
    other.kill()
    other.wait()


def test_init_cannot_be_killed_stopped_or_traced_from_inside(box: Sandbox):
    box.commands.run("kill -9 1; kill -STOP 1; kill -TERM 1")
    for attempt in [
        "/proc/1/environ",
        "/proc/1/fd/3",
        "/proc/1/mem",
        "/proc/$PPID/environ",
        "/proc/$PPID/mem",
    ]:
        assert "Permission denied" in box.commands.run(f"cat {attempt}").stderr, attempt
    assert box.commands.run("echo alive").stdout == "alive\n"
