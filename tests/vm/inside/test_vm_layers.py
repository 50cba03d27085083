"""Writable layers on disks of the guest's: one with project quotas, one without."""

import os
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

TOOLKIT = Path("/opt/toolkit")
LEAVE = r"""
import fcntl, os, struct
fd = os.open("/workspace", os.O_RDONLY)
flags, extent, number, project, more = struct.unpack("=IIIII8x", fcntl.ioctl(fd, 0x801C581F, bytes(28)))
print("project", project != 0)
for wanted in ((flags, 0), (flags & ~0x200, project)):
    try:
        fcntl.ioctl(fd, 0x401C5820, struct.pack("=IIIII8x", wanted[0], 0, 0, wanted[1], 0))
        print("left")
    except OSError as error:
        print("refused")
"""


FORMATS = {
    "ext4": ["mke2fs", "-q", "-F", "-t", "ext4", "-O", "quota,project", "-E", "quotatype=prjquota"],
    "xfs": ["mkfs.xfs", "-q", "-m", "reflink=1"],
}


@contextmanager
def mounted(kind, folder):
    """A file system with project quotas, in a file."""
    disk, place = folder / "disk", folder / "mounted"
    place.mkdir()
    with disk.open("wb") as file:
        file.truncate(320 << 20)
    subprocess.run([*FORMATS[kind], disk], check=True)
    subprocess.run(["mount", "-o", "loop,prjquota", disk, place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


@pytest.fixture(scope="module")
def quota_disk(tmp_path_factory):
    with mounted("ext4", tmp_path_factory.mktemp("quota")) as place:
        yield place


@pytest.fixture
def on_quota(quota_disk, substrate):
    """Makes sandboxes whose state lies there; afterwards nothing of them may."""
    from sandbox import Sandbox
    from sandbox.audit import check_integrity

    state = quota_disk / substrate
    made = []

    def make(**options):
        made.append(Sandbox.create(substrate=substrate, state_dir=state, toolkit=TOOLKIT, **options))
        return made[-1]

    make.state = state
    yield make
    for box in made:
        box.kill()
    assert check_integrity(state).leftovers == ()
    assert list((state / "layers").iterdir()) == []


def used(box):
    """Bytes and inodes that the kernel counts for a sandbox's project."""
    from sandbox.layers import quota

    directory = box._ownership.layer.directory
    return quota._usage(directory, quota._project(directory)[1])


def test_a_disk_layer_is_a_quota_where_there_is_one_and_else_an_image(create, on_quota):
    from sandbox.layers import loops

    box, other = on_quota(layer="disk", disk_mb=8), create(layer="disk", disk_mb=8)
    assert (box.info.limits.layer, other.info.limits.layer) == ("quota", "image")
    for each in (box, other):
        result = each.commands.run("echo text > a; cat a", timeout_s=120)
        assert result.stdout.startswith("text\n")
    assert list(loops.list_loops())


def test_bytes_end_and_a_neighbour_does_not_notice(on_quota):
    from sandbox.errors import NoSpace

    box, neighbour = on_quota(layer="quota", disk_mb=8), on_quota(layer="quota", disk_mb=8)
    result = box.commands.run("head -c 20M /dev/zero > big", timeout_s=120)
    assert "quota exceeded" in result.stderr or "No space left" in result.stderr
    size = int(box.commands.run("stat -c %s big", timeout_s=60).stdout)
    assert 7 << 20 <= size <= 8 << 20
    with pytest.raises(NoSpace):
        box.files.write("/workspace/more", bytes(1 << 20))
    neighbour.files.write("/workspace/a", bytes(6 << 20))
    assert 6 << 20 <= used(neighbour)[0] <= 8 << 20


def test_inodes_end(on_quota):
    box = on_quota(layer="quota", disk_mb=8)
    script = "for i in $(seq 2000); do : > $i || exit 7; done"
    assert box.commands.run(script, timeout_s=300).exit_code == 7
    assert used(box)[1] == box.info.limits.disk_inodes + 8


def test_a_sandbox_cannot_leave_its_project(on_quota):
    from sandbox import Policy

    for without in (frozenset(), frozenset({"seccomp"})):  # the kernel holds it, whoever is asked first
        box = on_quota(layer="quota", disk_mb=8, policy=Policy(without=without))
        result = box.commands.run(["python3", "-c", LEAVE], timeout_s=120)
        assert (result.exit_code, "left" in result.stdout) == (0, False), result.stderr
        box.commands.run("head -c 20M /dev/zero > big", timeout_s=120)
        assert used(box)[0] <= 8 << 20


def test_nothing_is_left_of_the_limits(on_quota):
    from sandbox.layers import quota

    box = on_quota(layer="quota", disk_mb=8)
    directory = box._ownership.layer.directory
    _, project = quota._project(directory)
    box.files.write("/workspace/a", bytes(1 << 20))
    box.kill()
    assert not directory.exists()
    subprocess.run(["sync"], check=True)
    assert quota._usage(on_quota.state, project) == (0, 0)


def test_what_an_owner_that_died_has_left_is_swept(on_quota):
    """A layer as such an owner leaves it: the directory, with limits, and no record."""
    from sandbox.audit import check_integrity, sweep
    from sandbox.layers.base import LayerSize
    from sandbox.layers.quota import QuotaLayers

    layer = QuotaLayers().make(on_quota.state, "sbx-gone", LayerSize(1 << 20, 64))
    layer.let_go()
    (layer.directory / "file").write_bytes(bytes(1000))
    assert [each.name for each in check_integrity(on_quota.state).leftovers] == [str(layer.directory)]
    sweep(on_quota.state)
    assert not layer.directory.exists()


def test_a_fork_of_one_has_a_quota_of_its_own(on_quota):
    box = on_quota(layer="quota", disk_mb=8)
    box.commands.run("head -c 5M /dev/urandom > a; sha256sum a > sum", timeout_s=120)
    fork = box.fork_fs()
    try:
        assert fork.info.limits.layer == "quota"
        assert fork.commands.run("sha256sum -c sum", timeout_s=120).stdout == "a: OK\n"
        assert "quota" in fork.commands.run("head -c 5M /dev/zero > b", timeout_s=120).stderr.lower()
        assert box.commands.run("head -c 2M /dev/zero > b", timeout_s=120).exit_code == 0
        for each in (box, fork):
            assert used(each)[0] <= 8 << 20
    finally:
        fork.kill()


def test_xfs_holds_it_too_and_shares_what_a_fork_copies(substrate, tmp_path):
    from sandbox import Sandbox
    from sandbox.audit import check_integrity
    from sandbox.layers import quota

    with mounted("xfs", tmp_path) as place:
        state = place / "state"
        box = Sandbox.create(substrate=substrate, state_dir=state, toolkit=TOOLKIT, layer="disk", disk_mb=32)
        assert box.info.limits.layer == "quota"
        box.commands.run("head -c 30M /dev/urandom > a; sha256sum a > sum", timeout_s=120)
        before = free(place)
        fork = box.fork_fs()
        assert before - free(place) < 8 << 20
        assert fork.commands.run("sha256sum -c sum", timeout_s=120).stdout == "a: OK\n"
        for each in (box, fork):
            result = each.commands.run("head -c 8M /dev/zero > b", timeout_s=120)
            assert "quota exceeded" in result.stderr or "No space left" in result.stderr
            assert used(each)[0] <= 32 << 20
        _, project = quota._project(box._ownership.layer.directory)
        for each in (box, fork):
            each.kill()
        assert check_integrity(state).leftovers == ()
        assert quota._usage(state, project) == (0, 0)


def free(place):
    subprocess.run(["sync"], check=True)
    disk = os.statvfs(place)
    return disk.f_bavail * disk.f_frsize
