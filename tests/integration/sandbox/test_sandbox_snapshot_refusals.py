"""Snapshots that cannot be: nothing is kept of any, and each says why."""

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from sandbox_snapshots import kind, store

from sandbox import Sandbox, Snapshot, Snapshots, cgroups
from sandbox.audit import check_integrity, sweep
from sandbox.errors import (
    CapacityError,
    FileTooLarge,
    InvalidArgument,
    SandboxError,
    SandboxGone,
    StartError,
    UnsafePath,
    UnsupportedError,
)
from sandbox.layers.base import LayerSize
from sandbox.layers.choice import MECHANISMS

__all__ = ["kind", "store"]  # fixtures

Create = Callable[..., Sandbox]
unified = next((each for each in cgroups.find_hierarchies() if each.version == 2), None)
pytestmark = pytest.mark.skipif(unified is None, reason="no cgroup version 2 here, which freezes")


def test_a_snapshot_that_is_too_large_fails_and_keeps_nothing(create: Create, store: Snapshots):
    box = create()
    box.commands.run("head -c 3M /dev/urandom > big")
    with pytest.raises(FileTooLarge, match="more than 1048576 bytes"):
        box.snapshot("big", max_mb=1)
    assert store.list() == ()
    assert not box.is_paused
    assert box.snapshot("big", max_mb=4).content_bytes >= 3 << 20
    with pytest.raises(InvalidArgument, match="max_mb=0"):
        box.snapshot(max_mb=0)


def test_a_file_beyond_the_owners_limit_is_said(create: Create, substrate: str, store: Snapshots):
    box = create(substrate=substrate)
    makes = {"big": "head -c 5M /dev/urandom > big", "holes": "truncate -s 1G holes"}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for file, make in makes.items():
        box.commands.run(make, check=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, hard))
        try:
            with pytest.raises(CapacityError, match=f"{file}: .* beyond the `ulimit -f`") as caught:
                box.snapshot("big")
            with pytest.raises(StartError, match=f"{file}: .* beyond the `ulimit -f`"):
                box.fork_fs()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert "ulimit -f" in caught.value.hint
        box.commands.run(f"rm {file}")
    assert store.list() == ()
    assert box.snapshot("big").entries > 0


@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk is root's to make")
def test_a_disk_that_is_full_is_said_and_nothing_stays_on_it(create: Create, state_dir: Path):
    if reason := MECHANISMS["image"].missing(state_dir):
        pytest.skip(reason)
    box = create()
    box.commands.run("head -c 3M /dev/urandom > big")
    disk = MECHANISMS["image"].make(state_dir, "", LayerSize(1 << 20, 64))
    place = Path(f"/proc/{os.getpid()}/fd/{disk.mount}")
    with pytest.raises(CapacityError, match="big: write: No space left on device") as caught:
        Snapshots(place).keep(box._copies.source(), "full", max_bytes=64 << 20)
    assert "delete snapshots" in caught.value.hint
    assert list((place / "snapshots").iterdir()) == []
    MECHANISMS["image"].remove(disk)


def test_names_are_checked_and_taken_once(create: Create, store: Snapshots):
    box = create()
    box.snapshot("one")
    with pytest.raises(InvalidArgument, match="'one' is there already"):
        box.snapshot("one")
    for name in ("", "../x", "a/b", ".hidden", "x" * 65):
        with pytest.raises(InvalidArgument, match="snapshot name"):
            box.snapshot(name)
    with pytest.raises(InvalidArgument, match="snapshot='two' is not there") as caught:
        create(snapshot="two")
    assert "there are: one" in caught.value.hint


def test_a_snapshot_is_for_sandboxes_that_it_fits(create: Create, store: Snapshots):
    box = create(disk_mb=64)
    box.commands.run("head -c 20M /dev/urandom > big")
    kept = box.snapshot("big")
    with pytest.raises(InvalidArgument, match=r"20 MiB in .* files, and disk_mb=8 holds less"):
        create(snapshot=kept, disk_mb=8)
    with pytest.raises(InvalidArgument, match="more than all of the sandbox's memory"):
        create(snapshot=kept, memory_mb=16)
    if os.geteuid() == 0:
        with pytest.raises(InvalidArgument, match="substrate='container', and snapshot big is of substrate"):
            create(snapshot=kept, substrate="container")


def test_a_tree_that_is_too_deep_is_refused(create: Create, store: Snapshots):
    box = create()
    box.commands.run("for i in $(seq 300); do mkdir d && cd d; done")
    with pytest.raises(UnsafePath, match="nested deeper than 200") as caught:
        box.snapshot()
    assert caught.value.blame == "agent"
    with pytest.raises(SandboxError, match="nested deeper than 200"):
        box.fork_fs(2)
    assert box.commands.run("echo on").stdout == "on\n"


def test_a_name_says_nothing_of_why_a_copy_failed(create: Create):
    box = create()
    box.commands.run("for i in $(seq 201); do mkdir 'No space left on device\n' && cd 'No'*; done")
    with pytest.raises(UnsafePath) as caught:
        box.snapshot()
    assert "\n" not in str(caught.value)


def test_one_that_has_ended_has_none(create: Create):
    box = create()
    box.kill()
    with pytest.raises(SandboxGone):
        box.snapshot()
    with pytest.raises(SandboxGone):
        box.fork_fs()


def outcome(box: Sandbox, name: str) -> Snapshot | SandboxError:
    try:
        return box.snapshot(name)
    except SandboxError as error:
        return error


def test_one_that_is_killed_meanwhile_leaves_nothing_of_half_a_copy(create: Create, store: Snapshots):
    with ThreadPoolExecutor(1) as pool:
        for number in range(4):
            box = create(disk_mb=128)
            box.commands.run("head -c 48M /dev/urandom > big")
            taken = pool.submit(outcome, box, f"cut-{number}")
            box.kill()
            kept = [each for each in store.list() if each.name == f"cut-{number}"]
            if isinstance(taken.result(), Snapshot):
                assert store.get(f"cut-{number}").content_bytes >= 48 << 20
            else:
                assert isinstance(taken.result(), SandboxGone)
                assert kept == []


def test_what_may_have_changed_while_it_was_copied_is_not_kept(create: Create, store: Snapshots):
    """A sandbox that is killed thaws before all of it is dead."""
    box = create()
    box.commands.run("echo a > a")
    source = box._copies.source()
    steps = iter([lambda: None, box.kill])

    def check() -> None:
        next(steps)()
        source.check()

    with pytest.raises(SandboxGone), box._life.held():
        store.keep(replace(source, check=check), "torn", max_bytes=1 << 20)
    assert store.list() == ()


OWNER = """
import sys, time
from sandbox import Sandbox
box = Sandbox.create(state_dir=sys.argv[1], toolkit=sys.argv[2])
with box._life.held():
    from sandbox.snapshots import Snapshots
    with Snapshots(sys.argv[1]).copied(box._copies.source(), "", 1 << 20):
        print("held", flush=True)
        time.sleep(600)
"""


def test_an_owner_that_dies_in_the_middle_leaves_what_a_sweep_finds(tmp_path: Path, toolkit: Path):
    state = tmp_path / "state"
    words = [sys.executable, "-c", OWNER, str(state), str(toolkit)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "held\n"
        owner.kill()
    kinds = {each.kind for each in sweep(state)}
    assert {"directory", "record"} <= kinds  # its processes end with it, frozen or not
    assert check_integrity(state).is_clean
    assert list((state / "snapshots").iterdir()) == []


def test_small_files_count_as_the_pages_that_they_need(create: Create, store: Snapshots):
    box = create()
    box.commands.run("for i in $(seq 200); do echo $i > $i; done")
    assert box.snapshot().content_bytes == 200 * 4096


def test_without_a_freezer_there_is_no_snapshot(create: Create):
    box = create()
    box._life.freezer._group = None
    with pytest.raises(UnsupportedError, match="cgroup version 2"):
        box.snapshot()
