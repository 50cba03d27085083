"""What each substrate asks for where a policy covers places and devices of the image."""

import json
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

import pytest

from sandbox.covers import Covers
from sandbox.images import Image
from sandbox.limits import Asked, settle
from sandbox.policy import Policy
from sandbox.substrates import find_substrate
from sandbox.substrates.base import Blueprint, init_command

COVERS = Covers(("/usr/share",), ("/usr/bin/cc",), ("/tmp", "/proc/sys"), ("ptmx", "zero"))
IMAGE = Image("host", Path("/s"), (), (), ("/workspace", "/tmp"), "/bin/sh", MappingProxyType({}))


@pytest.fixture(autouse=True)
def _tools_on_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in ("bwrap", "crun"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))


def blueprint(covers: Covers) -> Blueprint:
    limits = settle(Asked(), frozenset({"cpu", "memory", "pids", "disk"}))
    return Blueprint(
        "sbx-1", IMAGE, limits, 600_000, privileged=True, cgroups=(), born_in=None, pids_by_rlimit=False,
        protections=Policy().protections, profile=None, hide_unified=None, covers=covers,
    )  # fmt: skip


def test_bubblewrap_mounts_them_after_what_they_lie_on():
    words = list(find_substrate("function").plan(blueprint(COVERS)).program)
    before = words.index("--remount-ro")
    for device in ("/dev/zero", "/dev/pts/ptmx"):
        at = words.index(device)
        assert words[at - 2 : at] == ["--dev-bind", "/dev/null"]
        assert words.index("/dev/pts") < at < before
    assert words[words.index("/usr/share") - 1] == "--tmpfs"
    assert ("--remount-ro", "/usr/share") in pairwise(words)
    assert words[words.index("/usr/bin/cc") - 2 : words.index("/usr/bin/cc")] == ["--ro-bind", "/dev/null"]
    assert ("/tmp/root/tmp", "/tmp") in pairwise(words)
    assert "/proc/sys" not in words  # Landlock's


def test_an_oci_runtime_has_them_in_its_lists():
    plan = find_substrate("container").plan(blueprint(COVERS))
    assert plan.oci_config is not None
    linux = json.loads(plan.oci_config)["linux"]
    assert {"/usr/share", "/usr/bin/cc", "/dev/zero", "/dev/pts/ptmx", "/proc/kcore"} <= set(
        linux["maskedPaths"]
    )
    assert {"/tmp", "/proc/sys"} <= set(linux["readonlyPaths"])


def test_an_oci_runtime_mounts_outer_places_first():
    plan = find_substrate("container").plan(
        blueprint(Covers(read_only=("/var/tmp", "/proc", "/proc/fs/nfs")))
    )
    places = json.loads(plan.oci_config or "")["linux"]["readonlyPaths"]
    assert len(places) == len(set(places))
    assert places.index("/proc") < places.index("/proc/fs") < places.index("/proc/fs/nfs")


def test_landlock_leaves_out_what_is_not_to_be_written():
    assert init_command(blueprint(Covers()))[-3:] == ("/workspace", "/tmp", "/dev/shm")
    assert init_command(blueprint(COVERS))[-2:] == ("/workspace", "/dev/shm")
    assert Covers(read_only=("/var",)).writable(("/tmp", "/var/tmp", "/various")) == ("/tmp", "/various")


def test_without_covers_nothing_is_asked_for():
    words = list(find_substrate("function").plan(blueprint(Covers())).program)
    assert ("/dev/null" in words, words.count("--remount-ro")) == (False, 1)
