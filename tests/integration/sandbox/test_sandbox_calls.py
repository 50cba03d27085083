"""System calls that reach over a sandbox into what the whole machine shares."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import which

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
from sandbox import Policy, Sandbox
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


# As OWNER, with no filter in the way: looks for the secret in the session keyring, and by its number.
OWNER_UNFILTERED = (
    CALL
    + """
import sys
from sandbox import Policy, Sandbox
assert call((250, 219), 1, None) == 0
secret = libc.syscall((248, 217)[arm], b"user", b"owners-secret", b"x", 1, -3)
assert secret > 0
inside = CALL + "room = ctypes.create_string_buffer(8)\\n"
inside += "print(libc.syscall((250, 219)[arm], 0, -3, 0), "
inside += "call((250, 219), 10, -3, b'user', b'owners-secret', 0), "
inside += f"call((250, 219), 11, {secret}, room, 8))"
options = {"substrate": sys.argv[1], "state_dir": sys.argv[2], "toolkit": sys.argv[3]}
policy = Policy(without={"seccomp"})
with Sandbox.create(policy=policy, **options) as box, Sandbox.create(policy=policy, **options) as other:
    assert call((250, 219), 10, -3, b"user", b"owners-secret", 0) == 0
    for each in box, other:
        done = each.commands.run(["python3", "-c", inside])
        print(done.stdout, done.stderr)
    keys = open("/proc/keys").read()
    print("named", sum(each.info.id[:20] in keys for each in (box, other)))
"""
)


def test_a_session_keyring_of_its_own_without_a_name(substrate: str, state_dir: Path, toolkit: Path):
    """The kernel looks a name up in those of all sandboxes."""
    script = f"CALL = {CALL!r}\n{OWNER_UNFILTERED}"
    done = subprocess.run(
        [sys.executable, "-c", script, substrate, str(state_dir), str(toolkit)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    if "assert call((250, 219), 1" in done.stderr:
        pytest.skip("this kernel has no keyrings")
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert (words[1], words[4]) == ("126", "126")  # ENOKEY
    assert {words[2], words[5]} <= {"13", "126"}  # and EACCES
    assert words[0] != words[3]
    assert words[6:] == ["named", "0"]


NARROWED = (
    CALL
    + """
import fcntl, os, signal, struct
room = ctypes.create_string_buffer(120)
print("new", call((467, 467), -1, b"", 0, None, 0), call((470, 470)), call((700, 700)), call((469, 469), -1))
print("machine", call((298, 241), room, 0, -1, -1, 0), call((323, 282), 0), call((425, 425), 1, room))
print("options", *(call((157, 167), each, 1) for each in (67, 35, 62)), call((157, 167), 3))
print("personality", call((135, 92), 0xFFFFFFFF), call((135, 92), 0x400000), call((135, 92), 0x40000))
with open("file", "wb") as file:
    ask = lambda request: call((16, 29), file.fileno(), request, room)
    print("files", *map(ask, (0x40086602, 0x401C5820, 0xC0045877, 0xC0C0586D)))
    # Those that pass: what a file system says to them is its own.
    print("reads", *(ask(each) in (0, 9, 18, 22, 25, 95) for each in (0x80086601, 0x40049409)))
print("disks", call((162, 81)), call((306, 267), 1))
"""
)


def test_what_the_list_narrows_is_refused_for_real(box: Sandbox):
    result = box.commands.run(["python3", "-c", NARROWED])
    assert result.stdout.splitlines() == [
        "new 1 38 38 1",
        "machine 1 1 1",
        "options 22 22 22 0",
        "personality 0 1 0",
        "files 1 1 1 1",
        "reads True True",
        "disks 0 0",
    ], result.stderr


LOWERED = """
import os, resource
def lower(pid, kind, *values):
    try:
        print("lowered", resource.prlimit(pid, kind, *values))
    except OSError as error:
        print(error.errno)
own = resource.prlimit(0, resource.RLIMIT_NOFILE)
resource.prlimit(0, resource.RLIMIT_NOFILE, (own[0] - 1, own[1] - 1))
print(resource.getrlimit(resource.RLIMIT_NOFILE) == (own[0] - 1, own[1] - 1))
for pid in (1, os.getppid()):
    lower(pid, resource.RLIMIT_NOFILE, (7, 7))
    lower(pid, resource.RLIMIT_FSIZE, (0, 0))
    lower(pid, resource.RLIMIT_CPU, (1, 1))
    lower(pid, resource.RLIMIT_CPU)
"""


def test_a_command_lowers_no_limit_of_init_or_of_its_minder(box: Sandbox):
    result = box.commands.run(["python3", "-c", LOWERED])
    assert result.stdout.splitlines() == ["True", *["1"] * 8], result.stderr
    box.files.write("a", b"x" * 1000)
    assert box.commands.run("ulimit -c 0; ulimit -n 100; ulimit -n").stdout == "100\n"


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="only x86_64 has calls of other numbers")
@pytest.mark.parametrize("code", ["b827000040 0f05 c3", "b814000000 cd80 c3"], ids=["x32", "int80"])
def test_calls_by_other_doors_end_their_process(box: Sandbox, code: str):
    """getpid as x32 has it, and as programs of 32 bits do."""
    script = f"""
import ctypes, mmap
room = mmap.mmap(-1, 4096, prot=7)
room.write(bytes.fromhex("{code}"))
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(room)))()
"""
    result = box.commands.run(["python3", "-c", script])
    assert (result.reason, result.exit_code) == ("signal", 128 + 31)


@pytest.mark.skipif(not all(map(which, ("crun", "runc"))), reason="needs crun and runc")
def test_every_runtime_gives_the_same_answers(create: Callable[..., Sandbox], substrate: str):
    """By instructions of ours, or by a library's. Names that it is too old for are not there."""
    if substrate == "function":
        pytest.skip("has no runtime to choose")
    boxes = [create(substrate=substrate, runtime=name) for name in ("crun", "runc")]
    first, second = (box.commands.run(["python3", "-c", NARROWED]).stdout.splitlines() for box in boxes)
    assert (len(first), first[1:]) == (7, second[1:])
