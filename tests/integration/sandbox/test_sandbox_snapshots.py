"""What a sandbox has written, kept and given to others."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox import AsyncSandbox, Sandbox, Snapshot, Snapshots, cgroups
from sandbox.audit import check_integrity, sweep
from sandbox.errors import (
    CapacityError,
    FileTooLarge,
    InvalidArgument,
    SandboxError,
    SandboxGone,
    UnsupportedError,
)
from sandbox.layers.base import LayerSize
from sandbox.layers.choice import MECHANISMS
from sandbox.making import Made

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


@pytest.fixture(params=["memory", "image"])
def kind(request: pytest.FixtureRequest, state_dir: Path) -> str:
    if reason := MECHANISMS[request.param].missing(state_dir):
        pytest.skip(reason)
    return request.param


@pytest.fixture
def store(state_dir: Path):
    """Nothing may be left in it."""
    store = Snapshots(state_dir)
    yield store
    for each in store.list():
        each.delete()
    assert not [*(state_dir / "snapshots").glob("*"), *(state_dir / "snapshots").glob(".*")]


@pytest.fixture
def fork(create: Create):
    """Forks, killed before the leftovers are counted."""
    made: list[Sandbox] = []

    def fork_one(box: Sandbox) -> Sandbox:
        made.append(box.fork_fs())
        return made[-1]

    yield fork_one
    for each in made:
        each.kill()


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


def test_a_fork_has_what_its_origin_had_and_nothing_that_either_writes_later(
    create: Create, substrate: str, kind: str, fork: Callable[[Sandbox], Sandbox]
):
    box = create(substrate=substrate, layer=kind, labels={"run": "7"}, memory_mb=128)
    box.files.write("/workspace/a", "one\n")
    child = fork(box)
    box.files.write("/workspace/a", "two\n")
    child.commands.run("cat /workspace/a > /workspace/b; rm /workspace/a; echo new > /workspace/c")
    assert box.commands.run("cd /workspace; cat a; ls").stdout == "two\na\n"
    assert child.commands.run("cd /workspace; cat b; ls").stdout == "one\nb\nc\n"
    assert child.info.limits == box.info.limits
    assert child.info.labels == {"run": "7"}
    grandchild = fork(child)
    assert (
        grandchild.commands.run("cat /workspace/c; hostname").stdout == f"new\n{grandchild.info.hostname}\n"
    )


def test_a_fork_is_somebody_else(
    create: Create, substrate: str, fork: Callable[[Sandbox], Sandbox], store: Snapshots
):
    box = create(substrate=substrate)
    box.commands.start("sleep 600", env={"TOKEN": "secret-of-the-origin"})
    first, second = fork(box), fork(box)
    assert len({box.id, first.id, second.id}) == 3
    assert len({each.info.hostname for each in (box, first, second)}) == 3
    assert first.info.made_from == box.id
    seen = first.commands.run("ps -eo args=; cat /proc/[0-9]*/environ | tr '\\0' '\\n'").stdout
    assert "sleep 600" not in seen
    assert "secret-of-the-origin" not in seen
    script = "import socket; print(socket.gethostname(), socket.gethostbyname(socket.gethostname()))"
    assert first.commands.run(["python3", "-c", script]).stdout == f"{first.info.hostname} 127.0.0.1\n"
    first.snapshot("of-a-fork")
    other = create(substrate=substrate, snapshot="of-a-fork")
    assert other.commands.run(["python3", "-c", script]).stdout == "dockyard 127.0.0.1\n"
    owners = {each._made.first_id for each in (box, first, second)}
    assert len(owners) == 3 or os.geteuid() != 0
    drawn = [each.commands.run("head -c 16 /dev/urandom | sha256sum").stdout for each in (first, second)]
    assert drawn[0] != drawn[1]


def test_several_forks_at_once(create: Create):
    box = create()
    box.files.write("/workspace/a", "x")
    forks = box.fork_fs(3)
    try:
        assert [each.files.read("/workspace/a") for each in forks] == [b"x"] * 3
        assert len({each.id for each in forks}) == 3
    finally:
        for each in forks:
            each.kill()
    for number in (0, 101):
        with pytest.raises(InvalidArgument, match=f"n={number}"):
            box.fork_fs(number)


def test_none_is_idle_that_a_fork_is_made_of_or_that_waits_for_the_last(create: Create, monkeypatch):
    box = create(idle_s=1000)
    made: list[Sandbox] = []
    idle: list[Sandbox] = []

    def is_idle(each: Sandbox) -> bool:
        return each._life.deadline_ns() not in (None, each._life._expires_ns)  # None: held for its copy

    class Seen(Sandbox):
        def __init__(self, made_of: Made) -> None:
            idle.extend(each for each in (box, *made) if is_idle(each))
            super().__init__(made_of)
            made.append(self)

    monkeypatch.setattr("sandbox.sandbox.Sandbox", Seen)
    forks = box.fork_fs(3)
    assert list(forks) == made
    assert idle == []
    assert all(is_idle(each) for each in (box, *forks))  # again
    for fork in forks:
        fork.kill()


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


@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk is root's to make")
def test_a_disk_that_is_full_is_said_and_nothing_stays_on_it(create: Create, state_dir: Path):
    if reason := MECHANISMS["image"].missing(state_dir):
        pytest.skip(reason)
    box = create()
    box.commands.run("head -c 3M /dev/urandom > big")
    disk = MECHANISMS["image"].make(state_dir, "", LayerSize(1 << 20, 64))
    place = Path(f"/proc/{os.getpid()}/fd/{disk.mount}")
    with pytest.raises(CapacityError, match="big: write: No space left on device") as caught:
        Snapshots(place).keep(box._source(), "full", max_bytes=64 << 20)
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
    with pytest.raises(SandboxError, match="nested deeper than 200"):
        box.snapshot()
    with pytest.raises(SandboxError, match="nested deeper than 200"):
        box.fork_fs(2)
    assert box.commands.run("echo on").stdout == "on\n"


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
    source = box._source()
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
    with Snapshots(sys.argv[1]).copied(box._source(), "", 1 << 20):
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
    assert {"process", "directory", "record"} <= kinds
    assert check_integrity(state).is_clean
    assert list((state / "snapshots").iterdir()) == []


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


def test_small_files_count_as_the_pages_that_they_need(create: Create, store: Snapshots):
    box = create()
    box.commands.run("for i in $(seq 200); do echo $i > $i; done")
    assert box.snapshot().content_bytes == 200 * 4096


def test_without_a_freezer_there_is_no_snapshot(create: Create):
    box = create()
    box._life.freezer._group = None
    with pytest.raises(UnsupportedError, match="cgroup version 2"):
        box.snapshot()


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


def test_a_fork_has_the_network_that_holds_now(connect: Create, substrate: str):
    """Not the one that its origin was made with, which may have allowed more."""
    box = connect({"to": "192.0.2.1", "ports": [80]}, substrate=substrate)
    box.set_network("none", 1)
    child = box.fork_fs()
    try:
        network = child.info.policy.network
        assert network != "none"
        assert network.destinations == ()
        assert child._ownership._record.links == (child._ownership.connection.link.name,)
    finally:
        child.kill()
