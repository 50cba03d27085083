"""What runs in a sandbox cannot hurt the host, and each way of trying ends with its own reason."""

import os
import subprocess
import tracemalloc
from pathlib import Path

import pytest

from sandbox import Policy, Sandbox
from sandbox.audit import check_integrity
from sandbox.errors import FileError, SandboxError
from sandbox.journal import Journal
from sandbox.root_ranges import shared_root_ranges
from sandbox.substrates.base import UIDS_A_SANDBOX

needs_cgroups = pytest.mark.skipif(os.geteuid() != 0, reason="memory and pids cgroups need root")

FORK_BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
# A bomb that leaves its session and ignores signals.
HOSTILE_BOMB = """
import os, signal
for number in range(1, 32):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True:
    try:
        if os.fork() == 0:
            os.setsid()
    except OSError:
        pass
"""
# Kills the minder that watches it, and goes off among init's own children.
ORPHANED_BOMB = "import os\nos.kill(os.getppid(), 9)" + HOSTILE_BOMB


def processes(box: Sandbox) -> list[str]:
    """Command lines of all processes but init, the minder and ps itself."""
    lines = box.commands.run(["ps", "-eo", "args="]).stdout.splitlines()
    return [line for line in lines if "dockyard/init" not in line and not line.startswith("ps ")]


@needs_cgroups
@pytest.mark.parametrize("bomb", [FORK_BOMB, HOSTILE_BOMB], ids=["plain", "hostile"])
def test_a_fork_bomb_is_bounded_and_ends_with_its_time(create, substrate: str, bomb: str):
    box = create(substrate=substrate, pids=40)
    result = box.commands.run(["python3", "-c", bomb], timeout_s=1)
    assert result.reason == "timeout"
    (denial,) = result.denials
    assert denial.limit == "pids"
    assert "pids limit refused" in denial.detail
    assert processes(box) == []


@needs_cgroups
def test_a_fork_bomb_that_kills_its_watcher_ends_with_it(create, substrate: str):
    box = create(substrate=substrate, pids=40)
    result = box.commands.run(["python3", "-c", ORPHANED_BOMB], timeout_s=10)
    assert (result.reason, result.exit_code) == ("signal", 137)
    assert processes(box) == []


@needs_cgroups
def test_the_shells_fork_bomb_leaves_nothing_running(create, substrate: str):
    box = create(substrate=substrate, pids=40)
    result = box.commands.run(":(){ :|:& };:; sleep 1000", timeout_s=1)
    assert result.reason == "timeout"
    assert processes(box) == []


@needs_cgroups
def test_eating_memory_ends_with_oom_and_the_sandbox_lives(create, substrate: str):
    box = create(substrate=substrate, memory_mb=64)
    result = box.commands.run(["python3", "-c", "x = bytearray(500 << 20)"])
    assert (result.reason, result.exit_code) == ("oom", 137)
    assert result.denials[0].limit == "memory"
    assert box.commands.run("echo alive").stdout == "alive\n"


@needs_cgroups
def test_memory_eaten_behind_a_shell_is_oom_too(create, substrate: str):
    box = create(substrate=substrate, memory_mb=64)
    result = box.commands.run("python3 -c 'x = bytearray(500 << 20)'; code=$?; echo $code; exit $code")
    assert (result.reason, result.stdout) == ("oom", "137\n")


@needs_cgroups
def test_memory_hidden_in_files_counts(create, substrate: str):
    box = create(substrate=substrate, memory_mb=64, disk_mb=512)
    result = box.commands.run("head -c 400M /dev/zero > /workspace/big")
    assert result.reason == "oom"
    box.files.remove("/workspace/big")
    assert box.commands.run("echo alive").stdout == "alive\n"


def test_printing_for_ever_ends_with_output_limit_in_flat_memory(create, substrate: str):
    box = create(substrate=substrate, policy=Policy(output_bytes=10_000, output_total_bytes=30_000_000))
    tracemalloc.start()
    try:
        result = box.commands.run("echo first; yes; echo never")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert result.reason == "output_limit"
    assert result.truncated
    assert result.stdout.startswith("first\ny\n")
    assert "bytes dropped" in result.stdout
    assert len(result.stdout_bytes) < 11_000
    assert result.denials[0].limit == "output"
    assert peak < 5_000_000
    assert processes(box) == []


def test_output_beyond_the_cap_keeps_head_and_tail(box: Sandbox):
    result = box.commands.run("seq 100000", output_bytes=1000)
    assert (result.reason, result.exit_code, result.truncated) == ("exit", 0, True)
    assert result.stdout.startswith("1\n2\n3\n")
    assert result.stdout.endswith("99999\n100000\n")


def test_time_over_ends_the_whole_tree(box: Sandbox):
    result = box.commands.run("sleep 1001 & (setsid sleep 1002 &) ; sleep 1003", timeout_s=0.5)
    assert (result.reason, result.exit_code) == ("timeout", 137)
    assert processes(box) == []


def test_a_command_that_ignores_signals_ends_with_its_time(box: Sandbox):
    assert box.commands.run("trap '' TERM INT HUP; while :; do :; done", timeout_s=0.5).reason == "timeout"
    assert processes(box) == []


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


def children(pid: int) -> list[int]:
    """On the host, the oldest first."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def uid_of(pid: int) -> int:
    """Its real user on the host."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("Uid:")))


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


def test_the_writable_layer_is_bounded_in_bytes(create, substrate: str):
    box = create(substrate=substrate, disk_mb=8)
    result = box.commands.run("head -c 50M /dev/zero > /workspace/big")
    assert result.exit_code != 0
    assert "No space left" in result.stderr


def test_the_writable_layer_is_bounded_in_inodes(create, substrate: str):
    box = create(substrate=substrate, disk_mb=1)
    script = "import itertools\nfor i in itertools.count(): open(f'/workspace/{i}', 'w').close()"
    result = box.commands.run(["python3", "-c", script])
    assert "No space left" in result.stderr


def test_what_is_not_its_own_cannot_be_written(box: Sandbox):
    targets = [
        "/usr/bin/x",
        "/opt/toolkit/x",
        "/etc/passwd",
        "/x",
        "/.dockyard/init",
        "/dev/x",
        "/proc/sys/kernel/hostname",
    ]
    for target in targets:
        result = box.commands.run(f"echo changed > {target}")
        assert result.exit_code != 0, target
    for target in ["/workspace/x", "/tmp/x", "/root/x", "/dev/shm/x"]:
        assert box.commands.run(f"echo mine > {target}").ok, target


def test_the_hosts_devices_stay_the_hosts(box: Sandbox, state_dir: Path):
    """They are the host's own inodes, so an owner inside could shut everyone out."""
    (record,) = Journal(state_dir).records()
    names = ("null", "zero", "full", "tty", "urandom")
    if os.geteuid() == 0:
        assert uid_of(record.processes[-1].pid) not in {Path("/dev", name).stat().st_uid for name in names}
    result = box.commands.run(f"for name in {' '.join(names)}; do chmod 666 /dev/$name; done")
    assert result.stderr.count("not permitted") + result.stderr.count("Read-only") == len(names)


def test_the_hosts_own_files_and_packages_are_not_there(box: Sandbox, state_dir: Path):
    hidden = ["/home", "/boot", "/srv", "/etc/shadow", str(state_dir), str(Path(__file__))]
    for path in hidden:
        assert not box.files.exists(path), path
    assert box.files.list("/usr/local") == ()
    assert box.files.list("/root") == ()


def test_there_is_no_network(box: Sandbox):
    interfaces = [
        line.split(":")[0].strip() for line in box.commands.run("cat /proc/net/dev").stdout.splitlines()[2:]
    ]
    assert interfaces == ["lo"]
    script = "import socket; socket.create_connection(('192.0.2.1', 80), 3)"
    result = box.commands.run(["python3", "-c", script])
    assert "Network is unreachable" in result.stderr


def test_it_has_no_power(box: Sandbox):
    status = dict(
        line.split(":\t", 1)
        for line in box.commands.run("cat /proc/self/status").stdout.splitlines()
        if ":\t" in line
    )
    assert {int(status[name], 16) for name in ("CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb")} == {0}
    assert status["NoNewPrivs"] == "1"
    for attempt in [
        "mount -t tmpfs x /tmp",
        "unshare -Ur true",
        "unshare -m true",
        "chroot / true",
        "mknod /tmp/n b 1 1",
    ]:
        assert box.commands.run(attempt).exit_code != 0, attempt


def test_the_uid_outside_is_nobodys(create, substrate: str, state_dir: Path):
    if os.geteuid() != 0:
        pytest.skip("an ordinary user has one uid")
    box = create(substrate=substrate)
    command = box.commands.start("sleep 1000")
    box.commands.run("true")
    (record,) = Journal(state_dir).records()
    assert uid_of(record.processes[-1].pid) >= 0x24000000
    command.kill()


def test_live_sandboxes_of_root_share_no_id(create, substrate: str):
    if os.geteuid() != 0:
        pytest.skip("an ordinary user has one uid")
    boxes = [create(substrate=substrate) for _ in range(6)]
    firsts = [box._made.first_id for box in boxes]
    assert len(set(firsts)) == len(boxes)
    assert all(first % UIDS_A_SANDBOX == 0 for first in firsts)
    boxes[0].kill()
    ranges = shared_root_ranges()
    assert firsts[0] not in ranges._held
    assert set(firsts[1:]) <= ranges._held


def test_sandboxes_do_not_see_each_other(create, substrate: str):
    one, other = create(substrate=substrate), create(substrate=substrate)
    running = one.commands.start("sleep 1001")
    one.files.write("/tmp/mine", b"1")
    assert processes(other) == []
    assert not other.files.exists("/tmp/mine")
    running.kill()


def test_nothing_is_mounted_on_the_host(create, substrate: str, state_dir: Path):
    before = Path("/proc/self/mountinfo").read_text()
    create(substrate=substrate).commands.run("true")
    assert Path("/proc/self/mountinfo").read_text() == before
    assert check_integrity(state_dir).leftovers == ()
