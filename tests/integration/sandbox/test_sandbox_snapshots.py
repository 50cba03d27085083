"""What a sandbox has written, kept and had again."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from sandbox_snapshots import kind, store

from sandbox import AsyncSandbox, Sandbox, Snapshots, cgroups
from sandbox.audit import check_integrity
from sandbox.errors import (
    InvalidArgument,
)
from sandbox.layers.choice import MECHANISMS

__all__ = ["kind", "store"]  # fixtures

Create = Callable[..., Sandbox]
unified = next((each for each in cgroups.find_hierarchies() if each.version == 2), None)
pytestmark = pytest.mark.skipif(unified is None, reason="no cgroup version 2 here, which freezes")


MAKE = r"""
cd /workspace; umask 022
mkdir -p deep/er empty; echo text > deep/file; ln deep/file deep/er/again; ln -s ../nowhere deep/link
truncate -s 8M hole; printf x | dd of=hole bs=1 seek=4000000 conv=notrunc 2>/dev/null
mkfifo fifo; chmod 751 deep; chmod 2755 empty; chmod 4711 deep/file; touch -d @1000000000.25 deep/file deep
python3 -c "import socket; socket.socket(socket.AF_UNIX).bind('socket')"
echo gone > gone; rm gone; echo t > /tmp/t; echo r > /root/r; echo v > /var/tmp/v
"""


LOOK = r"""
cd /workspace; find . -printf '%p %y %m %U:%G %T@ %n %s %l\n' | grep -v '^\. ' | sort
cat deep/file /tmp/t /root/r /var/tmp/v; stat -c %b hole; sha256sum hole
stat -c %i deep/file deep/er/again | uniq | wc -l
"""


def looked(box: Sandbox) -> str:
    result = box.commands.run(LOOK, timeout_s=60)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    # Sizes of directories, and blocks of a file, are the file system's own business.
    return "\n".join(" ".join(line.split(" ")[:6]) if " d " in line else line for line in lines)


def test_all_that_was_written_comes_back(create: Create, substrate: str, kind: str, store: Snapshots):
    box = create(substrate=substrate, layer=kind)
    assert box.commands.run(MAKE, timeout_s=60).exit_code == 0
    before = looked(box)
    snapshot = box.snapshot("base")
    box.kill()
    other = "image" if kind == "memory" else "memory"
    for layer in (kind,) if MECHANISMS[other].missing(store._state_dir) else (kind, other):
        copy = create(substrate=substrate, layer=layer, snapshot="base")
        assert looked(copy) == before
        assert copy.info.made_from == "base"
        copy.kill()
    assert store.list() == (snapshot,)
    assert (snapshot.image, snapshot.substrate, snapshot.sandbox_id) == ("host", substrate, box.id)
    assert 0 < snapshot.content_bytes < 1 << 20
    assert snapshot.delete()
    assert not snapshot.delete()
    assert store.list() == ()


def test_it_is_of_one_moment(create: Create, store: Snapshots):
    """Two files that are written one after the other are never more than one step apart."""
    box = create()
    box.commands.start("i=0; while :; do i=$((i+1)); echo $i > a; echo $i > b; done")
    box.commands.run("until [ -s b ]; do sleep 0.001; done")
    for number in range(5):
        box.snapshot(f"moment-{number}")
        tree = store._directory / f"moment-{number}" / "tree" / "workspace"
        first, second = ((tree / name).read_text().strip() for name in "ab")
        # A file that is just being written is empty.
        assert not first or not second or 0 <= int(first) - int(second) <= 1
    assert not box.is_paused


def test_what_is_asked_meanwhile_is_answered_after(create: Create, store: Snapshots):
    box = create(disk_mb=128)
    box.commands.run("head -c 64M /dev/urandom > big")
    taken: list[object] = []
    thread = threading.Thread(target=lambda: taken.append(box.snapshot("big")))
    thread.start()
    answers = [box.commands.run("echo here", timeout_s=20) for _ in range(5)]
    thread.join()
    assert [each.stdout for each in answers] == ["here\n"] * 5
    assert taken == list(store.list())


def test_a_paused_sandbox_stays_paused(create: Create, store: Snapshots):
    box = create()
    box.pause()
    box.snapshot()
    assert box.is_paused
    assert box.commands.run("echo on").stdout == "on\n"


def test_a_snapshot_that_is_deleted_is_had_whole_or_not_at_all(create: Create, store: Snapshots):
    box = create()
    box.commands.run("for i in $(seq 300); do echo $i > $i; done")
    for number in range(4):
        kept = box.snapshot(f"short-lived-{number}")
        thread = threading.Thread(target=kept.delete)
        thread.start()
        with suppress(InvalidArgument):  # it was deleted first
            copy = create(snapshot=kept)
            assert copy.commands.run("ls | wc -l").stdout == "300\n"
            copy.kill()
        thread.join()


def test_a_lifetime_that_ends_meanwhile_waits_for_the_copy(create: Create):
    box = create(lifetime_s=60)
    with box._life.held():
        box._life._expires_ns = 0
        assert box._life.deadline_ns() is None
        assert box.is_running
    assert box._life.deadline_ns() == 0 or not box.is_running


def test_the_layer_is_in_the_memory_of_the_one_that_has_it(create: Create, store: Snapshots):
    """Not in this process's: a snapshot larger than the sandbox's memory would else be the host's to pay."""
    box = create(disk_mb=64, memory_mb=128)
    box.commands.run("head -c 40M /dev/urandom > big")
    box.snapshot("big")
    copy = create(disk_mb=64, memory_mb=128, snapshot="big")
    groups = [
        group.path for group in copy._ownership.groups._groups if "memory" in group.hierarchy.controllers
    ]
    if not groups:
        pytest.skip("no cgroup counts memory here")
    usage = next(groups[0].glob("memory.usage_in_bytes"), groups[0] / "memory.current")
    assert int(usage.read_text()) > 40 << 20


def test_asyncio_has_all_of_it(state_dir: Path, toolkit: Path):
    async def scenario() -> None:
        async with await AsyncSandbox.create(state_dir=state_dir, toolkit=toolkit) as box:
            await box.files.write("/workspace/a", "x")
            kept = await box.snapshot("async")
            try:
                async with await box.fork_fs() as child:
                    assert await child.files.read("/workspace/a") == b"x"
                with pytest.raises(InvalidArgument, match="n=0"):
                    await box.fork_fs(0)
                forks = await box.fork_fs(2)
                for each in forks:
                    await each.kill()
                assert forks[0].ended is not None
                forking = asyncio.ensure_future(box.fork_fs(2))
                await asyncio.sleep(0)
                forking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await forking
                taking = asyncio.ensure_future(box.snapshot("late"))
                await asyncio.sleep(0)
                taking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await taking
                assert [each.name for each in Snapshots(state_dir).list()] == ["async"]
            finally:
                kept.delete()

    asyncio.run(scenario())
    audit = check_integrity(state_dir)
    assert (audit.live, audit.leftovers) == ((), ())
