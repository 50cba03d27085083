"""Descriptors that have been sent and not received are counted by user, and who sends is held to its own
limit: commands that keep many under way keep no terminal or file from their owner, or it is said that they
do.
"""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from ordinary_user import User, user

from sandbox import Sandbox
from sandbox.audit import sweep
from sandbox.wire import TerminalSize

__all__ = ["user"]  # a fixture

HOLD_MANY = """
import errno, os, sys
from array import array
from socket import *
null, pairs = os.open("/dev/null", os.O_RDONLY), []
try:
    while True:
        pairs.append(socketpair(AF_UNIX, SOCK_DGRAM))
        for _ in range(5):
            pairs[-1][0].sendmsg([b"x"], [(SOL_SOCKET, SCM_RIGHTS, array("i", [null] * 253))])
except OSError as error:
    print(errno.errorcode[error.errno], flush=True)
sys.stdin.read()
"""
# An owner that may not have more descriptors than a command.
BOUND_OWNER = """
import resource, sys, threading
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
from sandbox import Sandbox
from sandbox.errors import SandboxError
from sandbox.wire import TerminalSize
state, toolkit = sys.argv[1:]
with Sandbox.create(state_dir=state, toolkit=toolkit) as box:
    held = threading.Event()
    command = box.commands.start(
        ["python3", "-c", HOLD_MANY], stdin=None, on_stdout=lambda _: held.set()
    )
    held.wait(30)
    for ask in (
        lambda: box.commands.start("echo hi", terminal=TerminalSize()).wait(),
        lambda: box.files.read("/etc/passwd"),
    ):
        try:
            print(ask())
        except SandboxError as error:
            print(error.code, error.blame)
    print(box.commands.run("echo alive").stdout, end="")
    command.kill()
    command.wait()
    print(box.commands.start("echo hi", terminal=TerminalSize()).wait().stdout, end="")
""".replace("HOLD_MANY", repr(HOLD_MANY))

# One owner's two sandboxes: what the first holds is counted for both.
TWO_OWN = """
import json, sys, threading
from sandbox import Sandbox
from sandbox.wire import TerminalSize
options = {"state_dir": sys.argv[1], "toolkit": sys.argv[2]}
with Sandbox.create(**options) as first, Sandbox.create(**options) as box:
    held = threading.Event()
    first.commands.start(["python3", "-c", HOLD_MANY], stdin=None, on_stdout=lambda _: held.set())
    held.wait(30)
    shown = box.commands.start("echo hi", terminal=TerminalSize()).wait().stdout
    read = box.files.read("/etc/passwd")[:5].decode()
    print(json.dumps([shown, read, box.commands.run("echo alive").stdout]))
""".replace("HOLD_MANY", repr(HOLD_MANY))


def test_descriptors_under_way_hold_up_no_terminal_and_no_file(box: Sandbox):
    held = threading.Event()
    command = box.commands.start(["python3", "-c", HOLD_MANY], stdin=None, on_stdout=lambda _: held.set())
    assert held.wait(30)
    shown = box.commands.start("echo hi; ulimit -Hn", terminal=TerminalSize()).wait()
    assert (shown.exit_code, shown.stdout) == (0, "hi\r\n1024\r\n")
    assert box.files.read("/etc/passwd").startswith(b"root:")
    command.close_stdin()
    assert command.wait().stdout == "ETOOMANYREFS\n"


def test_an_owner_without_more_is_told_and_its_sandbox_lives(tmp_path: Path, toolkit: Path):
    state = tmp_path / "state"
    done = subprocess.run(
        [sys.executable, "-c", BOUND_OWNER, str(state), str(toolkit)],
        cwd=Path(__file__).parents[3], text=True, capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    sweep(state)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["quota agent", "file_error agent", "alive", "hi"]


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_an_ordinary_users_sandboxes_do_not_hold_up_each_other(user: User):
    """Without the helper they share a user, and so what is counted by user."""
    assert user.run(TWO_OWN) == ["hi\r\n", "root:", "alive\n"]
