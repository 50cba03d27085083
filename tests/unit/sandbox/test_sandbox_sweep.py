"""A sweep ends what a dead owner's sandbox left, and nothing that merely speaks of it."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sandbox_places import no_descriptor_left

from sandbox import audit, cgroups
from sandbox.audit import Leftover, leftovers, sweep
from sandbox.errors import AuthError, CapacityError
from sandbox.journal import Journal, Record
from sandbox.processes import ProcessKey, boot_id, find_process, this_process

DEAD = ProcessKey(pid=4_194_999, start_ticks=1)  # above the largest pid
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def orphan(tmp_path: Path) -> str:
    """The id of a sandbox whose owner has died."""
    record = Record("sbx-orphan", DEAD, boot_id(), "function", cgroups=())
    Journal(tmp_path).write(record)
    return record.id


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts an interpreter that waits, under any name and with any further arguments."""
    started: list[subprocess.Popen[bytes]] = []

    def start_one(name: str, *arguments: str) -> "subprocess.Popen[bytes]":
        words = [name, "-c", "print(flush=True); input()", *arguments]
        pipe = subprocess.PIPE
        process = subprocess.Popen(words, executable=sys.executable, stdin=pipe, stdout=pipe)
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()  # only now are its arguments its own
        return process

    yield start_one
    for process in started:
        process.kill()
        process.communicate()


def test_whoever_looks_for_the_id_is_left_alone(orphan: str, start: Start, tmp_path: Path):
    reader = start("grep", orphan, "a.log")
    assert {each.kind for each in sweep(tmp_path)} == {"record"}
    assert reader.poll() is None


@pytest.mark.parametrize(
    "name", ["/somewhere/dockyard-init", "bwrap", "/usr/bin/crun", "runc", "/.dockyard/init"]
)
def test_a_launcher_that_was_never_written_down_is_ended(
    orphan: str, start: Start, tmp_path: Path, name: str
):
    launcher, other = start(name, orphan), start(name, "sbx-other")
    (found,) = [each for each in leftovers(tmp_path) if each.kind == "process"]
    assert (found.name, found.sandbox_id) == (str(launcher.pid), orphan)
    sweep(tmp_path)
    assert launcher.wait(10) == -9
    assert other.poll() is None


def test_nothing_of_a_live_owner_is_touched(start: Start, tmp_path: Path):
    Journal(tmp_path).write(Record("sbx-live", this_process(), boot_id(), "function", cgroups=()))
    launcher = start("bwrap", "sbx-live")
    assert sweep(tmp_path) == ()
    assert launcher.poll() is None


def test_a_pid_that_has_become_anothers_is_left_alone(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Between what was found and the sweep's signal."""
    process = start("python3")
    now = find_process(process.pid)
    assert now is not None
    before = ProcessKey(now.pid, now.start_ticks - 1)
    found = (Leftover("process", str(before.pid), "sbx-gone", before),)
    monkeypatch.setattr(audit, "leftovers", lambda state: found)
    assert sweep(tmp_path) == found
    assert process.poll() is None


def test_what_is_found_is_known_for_good(orphan: str, start: Start, tmp_path: Path):
    launcher = start("bwrap", orphan)
    (found,) = [each for each in leftovers(tmp_path) if each.kind == "process"]
    assert found.process == find_process(launcher.pid)
    sweep(tmp_path)
    assert launcher.wait() == -9


def test_a_record_that_was_none_when_it_was_looked_at_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    journal = Journal(tmp_path)
    journal.write(Record("sbx-live", this_process(), boot_id(), "function", cgroups=()))
    found = (Leftover("record", str(tmp_path / "sandboxes" / "sbx-live.json")),)
    with monkeypatch.context() as patches:
        patches.setattr(audit, "leftovers", lambda state: found)
        sweep(tmp_path)
    assert audit.check_integrity(tmp_path).live == ("sbx-live",)


def test_a_mount_of_the_administrators_that_is_called_dockyard_stays(tmp_path: Path):
    place = tmp_path / "a place"
    place.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=4k", "dockyard", str(place)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        assert sweep(tmp_path) == ()
        assert place.is_mount()
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_group_that_cannot_be_removed_keeps_no_other_from_being_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its own sandbox stays for the next sweep, which finds it by its record."""
    journal, ids = Journal(tmp_path), ("sbx-foreign", "sbx-own")
    for each in ids:
        journal.write(Record(each, DEAD, boot_id(), "function", cgroups=()))
    found = [Leftover("cgroup", f"/nowhere/{each}", each) for each in ids]
    found += [Leftover("record", each, each) for each in ids]
    removed = list[str]()

    def remove_group(path: Path) -> None:
        if path.name == "sbx-foreign":
            raise AuthError(f"cgroup {path} is another user's")
        removed.append(path.name)

    with monkeypatch.context() as patches:
        patches.setattr(audit, "leftovers", lambda state: tuple(found))
        patches.setattr(cgroups, "remove_group", remove_group)
        with pytest.raises(AuthError, match="sbx-foreign"):
            sweep(tmp_path)
    assert removed == ["sbx-own"]
    assert [record.id for record in journal.records()] == ["sbx-foreign"]


@pytest.mark.parametrize("look", [leftovers, sweep])
def test_a_want_of_descriptors_is_a_shortage(orphan: str, tmp_path: Path, look: Callable[[Path], object]):
    with no_descriptor_left(), pytest.raises(CapacityError, match="Too many open files"):
        look(tmp_path)
    assert {each.sandbox_id for each in sweep(tmp_path)} == {orphan}


@pytest.fixture
def group() -> Iterator[Path]:
    """A cgroup of version 1 or 2."""
    found = cgroups.find_hierarchies()
    if not found:
        pytest.skip("no cgroup can be made here")
    path = found[0].root / f"dockyard-test-{os.getpid()}"
    path.mkdir()
    yield path
    cgroups.remove_group(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's record is needed")
@pytest.mark.parametrize("way", ["process", "argument", "group", "folder"])
def test_roots_sweep_of_a_users_state_ends_nothing_of_roots(
    start: Start, tmp_path: Path, group: Path, way: str
):
    """Whatever his record says: he could have written it for that."""
    victim = start("bwrap", "sbx-1") if way == "argument" else start("python3")
    key = find_process(victim.pid)
    assert key is not None
    place = tmp_path if way == "folder" else group
    (place / "cgroup.procs").write_text(f"{victim.pid}\n")
    groups = (str(place),) if way in ("group", "folder") else ()
    processes = (key,) if way == "process" else ()
    Journal(tmp_path).write(Record("sbx-1", DEAD, boot_id(), "function", groups, processes))
    os.chown(tmp_path / "sandboxes" / "sbx-1.json", 65531, 65531)
    assert {each.kind for each in sweep(tmp_path)} == {"record"}
    assert victim.poll() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's process is needed")
def test_what_is_the_users_is_ended(tmp_path: Path):
    words = ["sleep", "60"]
    with subprocess.Popen(words, user=65531, group=65531, extra_groups=[]) as process:
        key = find_process(process.pid)
        assert key is not None
        Journal(tmp_path).write(Record("sbx-1", DEAD, boot_id(), "function", (), (key,)))
        os.chown(tmp_path / "sandboxes" / "sbx-1.json", 65531, 65531)
        sweep(tmp_path)
        assert process.wait(10) == -9
