"""The guard of what is tried outside: whatever a probe does there, it takes a bounded part of the machine."""

import os
from pathlib import Path

import pytest

from bench.attack_cases import guard
from bench.attack_cases.arena import Arena
from bench.attack_cases.model import Identity, Probe, Seen

pytestmark = [
    pytest.mark.parametrize("arena", ["function"], indirect=True),
    pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's guard has no mounts and no cgroups"),
]
EVERYBODY = ("user", "namespace", "root")
TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm")


def takes(arena: Arena, identity: Identity, function: str, *arguments: str, disk: bool = False) -> Seen:
    return arena.outside(Probe("takes", function, arguments, timeout_s=60), identity, disk=disk)


@pytest.mark.parametrize("identity", EVERYBODY)
def test_all_that_it_writes_is_of_one_size(arena: Arena, identity: Identity):
    for folder in TEMPORARY:
        assert takes(arena, identity, "bytes_in", folder, "8").opened
        assert takes(arena, identity, "bytes_in", folder, str(guard.ROOM_MB + 1)).said == "ENOSPC"
        assert takes(arena, identity, "files_in", folder, str(guard.ROOM_FILES + 1)).said == "ENOSPC"


def test_places_for_temporary_files_are_one_room(arena: Arena):
    """It is the whole that is bounded, not each."""
    half = str(guard.ROOM_MB * 5 // 8)
    words = ["bytes_in_all", half, *TEMPORARY]
    assert takes(arena, "user", *words).said == "ENOSPC"


@pytest.mark.parametrize("identity", EVERYBODY)
def test_what_the_host_keeps_it_cannot_write_to(arena: Arena, identity: Identity):
    places = (arena.open_place, Path("/"), Path("/etc"), Path("/var"), Path("/root"))
    for place in places:
        seen = arena.outside(Probe("paths", "make_file", (f"{place}/written",)), identity)
        assert seen.said in ("EROFS", "EACCES"), (place, seen)
        assert not (place / "written").exists()


def test_its_disk_is_a_disk_and_ends(arena: Arena):
    seen = takes(arena, "user", "disk_writes", str(arena.disk), "2", disk=True)
    assert seen.said == "2 MiB were written to a disk"
    assert takes(arena, "user", "bytes_in", str(arena.disk), str(guard.DISK_MB), disk=True).said == "ENOSPC"
    assert not arena.disk.is_mount()


def test_memory_and_processes_end_too(arena: Arena):
    assert takes(arena, "user", "processes", str(guard.PIDS)).said == "EAGAIN"
    assert not takes(arena, "user", "memory", str(guard.MEMORY_MB + 64)).opened


def test_the_host_sees_nothing_of_its_mounts(arena: Arena):
    before = Path("/proc/self/mountinfo").read_text()
    takes(arena, "root", "bytes_in", "/tmp", "1", disk=True)
    assert Path("/proc/self/mountinfo").read_text() == before
