"""A full sandbox says so to who writes into it, and lives: the OOM killer does not end init, which writes."""

import os

import pytest

from sandbox import Sandbox
from sandbox.errors import NoSpace

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a limit on memory needs root")

MIB = 1 << 20
# Of a shared segment that stays when whoever made it has ended, as many mebibytes as it is told.
KEEP_SHARED = """
import ctypes, sys
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
size = int(sys.argv[1]) << 20
segment = libc.shmget(0, ctypes.c_size_t(size), 0o1600)
assert segment >= 0
ctypes.memset(libc.shmat(segment, None, 0), 1, size)
"""


def assert_alive(box: Sandbox) -> None:
    assert box.commands.run("echo alive").stdout == "alive\n"


def write_until_full(box: Sandbox, size: int, most: int) -> NoSpace:
    for number in range(most):
        try:
            box.files.write(f"of-{size}/{number}", b"x" * size)
        except NoSpace as error:
            return error
    raise AssertionError(f"{most} files of {size} bytes found room")


def make_many(box: Sandbox, most: int) -> None:
    for number in range(most):
        box.files.make_dir(f"made/{number}")


@pytest.mark.parametrize("size", [64, MIB])
def test_what_commands_have_filled_is_said_to_who_writes(create, substrate: str, size: int):
    """Commands that have ended have left memory full: nobody is there for the OOM killer but init."""
    box = create(substrate=substrate, memory_mb=64, disk_mb=64)
    assert box.commands.run(["python3", "-c", KEEP_SHARED, "31"]).ok
    assert box.commands.run("head -c 29M /dev/zero > big").ok
    error = write_until_full(box, size, 4000)
    assert (error.blame, error.code) == ("agent", "no_space")
    assert_alive(box)
    with pytest.raises(NoSpace):
        make_many(box, 4000)
    assert_alive(box)
    box.files.remove("big")
    box.files.write("big", b"x" * 16 * MIB)
    assert_alive(box)


def test_a_file_larger_than_memory_is_said_to_be(create, substrate: str):
    box = create(substrate=substrate, memory_mb=32)
    with pytest.raises(NoSpace, match="memory is full"):
        box.files.write("big", b"x" * 100 * MIB)
    assert_alive(box)
    assert len(box.files.read("big")) < 32 * MIB


def test_a_file_that_fills_memory_can_be_written_anew(create, substrate: str):
    box = create(substrate=substrate, memory_mb=32)
    with pytest.raises(NoSpace):
        box.files.write("big", b"x" * 100 * MIB)
    box.files.write("big", b"y" * 16 * MIB)
    assert box.files.read("big") == b"y" * 16 * MIB
    assert_alive(box)
