"""What a sandbox writes has a place and an end, whatever it is made of."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox import Sandbox, cgroups
from sandbox.audit import check_integrity, sweep
from sandbox.errors import CapacityError, InvalidArgument, NoSpace, UnsupportedError
from sandbox.layers import image, loops
from sandbox.layers.base import LayerKind, LayerSize
from sandbox.layers.choice import MECHANISMS, choose

Create = Callable[..., Sandbox]
FILL = "for i in $(seq 40); do head -c 1M /dev/zero > /workspace/$i || exit 7; done"
FILES = "for i in $(seq 40000); do : > /workspace/$i || exit 7; done"


@pytest.fixture(params=["memory", "image", "quota"])
def kind(request: pytest.FixtureRequest, state_dir: Path) -> LayerKind:
    """Those that this host has."""
    if reason := MECHANISMS[request.param].missing(state_dir):
        pytest.skip(reason)
    return request.param


@pytest.fixture
def on_disk(state_dir: Path) -> LayerKind:
    """The one that `disk` means here."""
    try:
        return choose("disk", state_dir)
    except UnsupportedError as error:
        pytest.skip(error.message)


def our_loops(state_dir: Path) -> list[loops.Loop]:
    return [loop for loop in loops.list_loops() if loop.state == cgroups.state_key(state_dir)]


def until(holds: Callable[[], bool]) -> None:
    """The kernel frees things a moment after their last user."""
    give_up = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.005)


def test_a_full_layer_says_so_inside_and_a_neighbour_does_not_notice(
    create: Create, kind: LayerKind, substrate: str
):
    box = create(substrate=substrate, layer=kind, disk_mb=16)
    neighbour = create(substrate=substrate, layer=kind, disk_mb=16)
    full = box.commands.run(FILL, timeout_s=60)
    assert full.exit_code == 7
    assert "No space left" in full.stderr or "quota exceeded" in full.stderr
    held = int(box.commands.run("du -sm /workspace | cut -f1").stdout)
    assert 15 <= held <= 18
    with pytest.raises(NoSpace):
        box.files.write("/workspace/more", bytes(4 << 20))
    neighbour.files.write("/workspace/a", bytes(8 << 20))
    assert box.commands.run("rm -r /workspace/* && echo ok > /workspace/a").exit_code == 0


def test_inodes_end_too(create: Create, kind: LayerKind, substrate: str):
    box = create(substrate=substrate, layer=kind, disk_mb=8)
    result = box.commands.run(FILES, timeout_s=120)
    assert result.exit_code == 7
    made = int(box.commands.run("ls /workspace | wc -l").stdout)
    assert 0.9 * box.info.limits.disk_inodes <= made <= box.info.limits.disk_inodes + 40


def test_what_holds_is_echoed(create: Create, kind: LayerKind, on_disk: LayerKind):
    assert create().info.limits.layer == "memory"
    assert create(layer=kind).info.limits.layer == kind
    assert create(layer="disk").info.limits.layer == on_disk


def test_on_disk_it_is_not_the_sandboxs_memory(create: Create, on_disk: LayerKind, substrate: str):
    box = create(substrate=substrate, layer="disk", memory_mb=32, disk_mb=128)
    result = box.commands.run(
        "head -c 96M /dev/zero > /workspace/big; stat -c %s /workspace/big", timeout_s=120
    )
    assert (result.reason, result.stdout, result.denials) == ("exit", f"{96 << 20}\n", ())


def test_a_layer_is_empty_whatever_the_one_before_held(create: Create, kind: LayerKind):
    for _ in range(3):
        box = create(layer=kind, disk_mb=8)
        assert box.commands.run("find /workspace /tmp /root /var/tmp -mindepth 1").stdout == ""
        box.commands.run("echo x | tee /workspace/a /tmp/a /root/a /var/tmp/a")
        box.kill()


def test_no_mount_is_seen_on_the_host_and_none_is_left(create: Create, kind: LayerKind, state_dir: Path):
    before = Path("/proc/self/mounts").read_text()
    box = create(layer=kind)
    assert Path("/proc/self/mounts").read_text() == before
    box.kill()
    MECHANISMS["image"].missing(state_dir)
    image_layers = MECHANISMS["image"]
    assert isinstance(image_layers, image.ImageLayers)
    image_layers.drain()
    until(lambda: not our_loops(state_dir))
    assert not [path for path in (state_dir / "layers").glob("*") if not path.name.startswith("template-")]


def test_wishes_that_nobody_can_fulfil_are_refused(create: Create):
    with pytest.raises(InvalidArgument, match="layer='tape' is unknown") as caught:
        create(layer="tape")
    assert "'disk'" in caught.value.hint


def test_a_kind_that_this_host_lacks_is_refused_with_the_reason(create: Create, state_dir: Path):
    reason = MECHANISMS["quota"].missing(state_dir)
    if not reason:
        pytest.skip("this host has project quotas")
    with pytest.raises(UnsupportedError, match="layer='quota' cannot be made") as caught:
        create(layer="quota")
    assert reason in caught.value.message
    assert "leave layer out" in caught.value.hint


@pytest.mark.skipif(os.geteuid() != 0, reason="loop devices are root's")
def test_a_disk_without_room_is_said_before_anything_is_made(create: Create, state_dir: Path):
    choose("image", state_dir)
    huge = 1 << 24
    with pytest.raises(CapacityError, match=f"disk_mb={huge}: .* MiB free"):
        create(layer="image", disk_mb=huge)


OWNER = """
import sys, time
from sandbox import Sandbox
box = Sandbox.create(layer=sys.argv[3], substrate=sys.argv[4], state_dir=sys.argv[1], toolkit=sys.argv[2])
box.files.write("/workspace/a", "x")
print(box.id, flush=True)
time.sleep(600)
"""


def test_an_owner_that_is_killed_leaves_no_layer(
    kind: LayerKind, substrate: str, tmp_path: Path, toolkit: Path
):
    state = tmp_path / "state"
    words = [sys.executable, "-c", OWNER, str(state), str(toolkit), kind, substrate]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline().startswith("sbx-")
        owner.send_signal(signal.SIGKILL)
    until(lambda: not our_loops(state))
    sweep(state)
    until(lambda: check_integrity(state).is_clean)
    left = [path.name for path in (state / "layers").glob("*")]
    assert all(name.startswith("template-") for name in left)


@pytest.mark.skipif(os.geteuid() != 0, reason="a layer is put there by hand")
def test_directories_and_drafts_without_an_owner_are_found_and_removed(tmp_path: Path):
    layers, snapshots = image.place(tmp_path), tmp_path / "snapshots"
    (layers / "sbx-gone" / "upper" / "a").mkdir(parents=True)
    (layers / "draft-4194999-x").touch()
    (layers / f"draft-{os.getpid()}-x").touch()
    (snapshots / ".draft-4194999-x" / "tree").mkdir(parents=True)
    (snapshots / "kept").mkdir()
    names = {Path(each.name).name for each in sweep(tmp_path)}
    assert names == {"sbx-gone", "draft-4194999-x", ".draft-4194999-x"}
    assert check_integrity(tmp_path).is_clean
    assert {path.name for path in (*layers.iterdir(), *snapshots.iterdir())} == {
        f"draft-{os.getpid()}-x", "kept"
    }  # fmt: skip


@pytest.mark.skipif(os.geteuid() != 0, reason="loop devices are root's")
def test_a_layer_is_made_ahead_and_drained(state_dir: Path):
    layers, size = image.ImageLayers(), LayerSize(8 << 20, 1024)
    if reason := layers.missing(state_dir):
        pytest.skip(reason)
    first = layers.make(state_dir, "sbx-1", size)
    until(lambda: len(our_loops(state_dir)) == 2)
    second = layers.make(state_dir, "sbx-2", size)
    assert first.mount is not None
    assert second.mount is not None
    for layer in (first, second):
        layers.remove(layer)
        layers.remove(layer)
    layers.drain()
    until(lambda: not our_loops(state_dir))
