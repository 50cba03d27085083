"""What the kernel counts for a whole machine or for one of its users: a sandbox takes a small part of it."""

import ctypes
import os
from pathlib import Path

import pytest

from sandbox import Sandbox

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's sandboxes share the user's own")

# Takes what it can get of each, says how much, and keeps it until it is killed.
TAKE_SIGNALS = """
import ctypes, time
libc, taken = ctypes.CDLL(None), 0
timer = ctypes.c_void_p()
while taken < 20000 and libc.timer_create(1, None, ctypes.byref(timer)) == 0:
    taken += 1
open("taken", "w").write(str(taken))
time.sleep(1000)
"""
TAKE_INOTIFY = """
import ctypes, time
libc, taken = ctypes.CDLL(None), 0
while libc.inotify_init1(0) >= 0:
    taken += 1
open("taken", "w").write(str(taken))
time.sleep(1000)
"""
TAKE_TERMINALS = """
import os
taken = []
try:
    while True:
        taken.append(os.openpty())
except OSError:
    print(len(taken))
"""
WAIT = "until [ -s taken ]; do sleep 0.01; done; cat taken"


def queued_signals() -> int:
    """Of this process's user, on the host."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1].split("/")[0] for line in lines if line.startswith("SigQ:")))


@needs_root
def test_signals_of_a_sandbox_are_not_the_owners(box: Sandbox):
    before = queued_signals()
    command = box.commands.start(["python3", "-c", TAKE_SIGNALS])
    assert 1000 < int(box.commands.run(WAIT).stdout) <= 4096
    assert queued_signals() < before + 1000
    command.kill()
    command.wait()


@needs_root
def test_inotify_instances_of_sandboxes_are_not_the_owners(create, substrate: str):
    commands = []
    for box in (create(substrate=substrate), create(substrate=substrate)):
        commands.append(box.commands.start(["python3", "-c", TAKE_INOTIFY]))
        assert int(box.commands.run(WAIT).stdout) > 50
    descriptor = ctypes.CDLL(None).inotify_init1(0)
    assert descriptor >= 0
    os.close(descriptor)
    for command in commands:
        command.kill()
        command.wait()


def test_terminals_are_bounded_and_work(box: Sandbox):
    assert int(box.commands.run(["python3", "-c", TAKE_TERMINALS]).stdout) == 64
    result = box.commands.run(["python3", "-c", "import pty; pty.spawn(['tty'])"])
    assert result.stdout.strip() == "/dev/pts/0"
