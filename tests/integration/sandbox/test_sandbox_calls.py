"""System calls that reach over a sandbox into what the whole machine shares."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox import Sandbox

REPOSITORY = Path(__file__).parents[3]
# Numbers of x86_64 and aarch64; the errno of each call, 0 where it went through.
CALL = """
import ctypes, platform
libc = ctypes.CDLL(None, use_errno=True)
arm = platform.machine() == "aarch64"
def call(numbers, *arguments):
    number = numbers[arm]
    return 0 if libc.syscall(number, *arguments) >= 0 else ctypes.get_errno()
"""
CALLS = (
    CALL
    + """
room = ctypes.create_string_buffer(120)
print(call((250, 219), 1, None), call((248, 217), b"user", b"a", b"b", 1, -3))
print(call((249, 218), b"user", b"a", 0, 0), call((206, 0), 1, room), call((425, 425), 1, room))
print(call((304, 265), 0, None, 0), call((435, 435), None, 0), call((16, 29), 0, 0x5412, b"x"))
"""
)
FAMILIES = """
import socket
for family in (1, 2, 10, 16, 17, 38, 40):
    kind = {38: socket.SOCK_SEQPACKET, 40: socket.SOCK_STREAM}.get(family, socket.SOCK_DGRAM)
    try:
        socket.socket(family, kind, 0).close()
        print(family, 0)
    except OSError as error:
        print(family, error.errno)
"""
# Joins a session keyring with a secret in it, as an owner who has logged in has one, and makes a sandbox.
OWNER = (
    CALL
    + """
import sys
from sandbox import Sandbox
assert call((250, 219), 1, None) == 0
assert call((248, 217), b"user", b"owners-secret", b"x", 1, -3) == 0
with Sandbox.create(substrate=sys.argv[1], state_dir=sys.argv[2], toolkit=sys.argv[3]) as box:
    print(box.commands.run("cat /proc/keys").stdout)
"""
)


def test_keys_contexts_and_rings_are_refused(box: Sandbox):
    result = box.commands.run(["python3", "-c", CALLS])
    assert (result.stdout.split(), result.stderr) == (["1", "1", "1", "38", "1", "1", "38", "1"], "")


def test_sockets_of_other_families_are_refused(box: Sandbox):
    result = box.commands.run(["python3", "-c", FAMILIES])
    found = dict(line.split() for line in result.stdout.splitlines())
    assert found == {"1": "0", "2": "0", "10": "0", "16": "0", "17": "97", "38": "97", "40": "97"}


def test_threads_and_processes_still_start(box: Sandbox):
    script = "import subprocess, threading; threading.Thread(target=print, args=(1,)).start()"
    result = box.commands.run(["python3", "-c", f"{script}; subprocess.run(['true'], check=True)"])
    assert (result.stdout, result.stderr) == ("1\n", "")


def test_a_command_has_only_its_own_files(box: Sandbox):
    result = box.commands.run(["python3", "-c", "import os; print(sorted(os.listdir('/proc/self/fd')))"])
    assert result.stdout == "['0', '1', '2', '3']\n"  # the last is the listing's own


def test_the_owners_keys_are_out_of_reach(substrate: str, state_dir: Path, toolkit: Path):
    done = subprocess.run(
        [sys.executable, "-c", OWNER, substrate, str(state_dir), str(toolkit)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    if "assert call((250" in done.stderr:
        pytest.skip("this kernel has no keyrings")
    assert done.returncode == 0, done.stderr
    assert "owners-secret" not in done.stdout
