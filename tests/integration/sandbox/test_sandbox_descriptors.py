"""What a sandbox hands to its owner to read is a descriptor, and its owner may more than it may."""

import resource
import threading

import pytest

from sandbox import Sandbox
from sandbox.errors import FileError, FileTooLarge, UnsafePath

WRITE_LINKS = "import os\nfor number in range(9000): os.symlink('x' * 4000, f'/workspace/many/{number}')"
NAME_DEEPLY = """
import os
for _ in range(12):
    os.mkdir("d" * 250), os.chdir("d" * 250)
for number in range(12_000):
    os.close(os.open(f"{number}", os.O_CREAT))
"""
HOLD_A_LEASE = """
import fcntl, os, signal, sys
signal.signal(signal.SIGIO, signal.SIG_IGN)
fd = os.open("/workspace/leased", os.O_CREAT | os.O_RDWR)
fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    "place",
    ["sys/kernel/hostname", "sys/kernel/ns_last_pid", "self/cgroup", "1/maps", "1/environ", "self/ns/pid"],
)
def test_nothing_of_the_host_is_read_by_the_owners_rights(box: Sandbox, place: str):
    """The first three say what holds for the reader, the rest what the reader may see."""
    box.commands.run(["ln", "-s", f"/proc/{place}", "/workspace/out.txt"])
    with pytest.raises(UnsafePath, match="let a command read it"):
        box.files.read("out.txt")
    found = box.files.download_dir("/workspace")
    assert (found.files, set(found.links)) == ({}, {"out.txt"})


def test_a_directory_of_long_links_is_not_kept_in_memory(box: Sandbox):
    box.files.make_dir("many")
    assert box.commands.run(["python3", "-c", WRITE_LINKS]).ok
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FileTooLarge):
        box.files.list("many")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
    with pytest.raises(FileTooLarge):
        box.files.download_dir("/workspace")


def test_names_count_in_a_download(box: Sandbox):
    assert box.commands.run(["python3", "-c", NAME_DEEPLY]).ok
    with pytest.raises(FileTooLarge):
        box.files.download_dir("/workspace")


def test_a_lease_is_not_waited_for(box: Sandbox):
    is_held = threading.Event()
    held = box.commands.start(["python3", "-c", HOLD_A_LEASE], stdin=None, on_stdout=lambda _: is_held.set())
    assert is_held.wait(30)
    for attempt in (lambda: box.files.read("leased"), lambda: box.files.write("leased", b"x")):
        with pytest.raises(FileError, match="temporarily unavailable"):
            attempt()
    held.kill()
