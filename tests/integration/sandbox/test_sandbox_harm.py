"""What runs in a sandbox cannot use up the host, and each way of trying ends with its own reason."""

import os
import tracemalloc

import pytest
from sandbox_processes import processes

from sandbox import Policy, Sandbox

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
