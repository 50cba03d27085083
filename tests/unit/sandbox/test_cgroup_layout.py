"""Which hierarchies there are, and what is written to them: versions 1, 2 and both."""

import os
from pathlib import Path

import pytest

from sandbox import cgroups
from sandbox.cgroups import (
    ABANDONED_S,
    TOP,
    Groups,
    Hierarchy,
    find_hierarchies,
    plan_groups,
    remove_abandoned,
    settings,
)
from sandbox.errors import CapacityError
from sandbox.limits import Asked, settle

HYBRID = """\
proc /proc proc rw 0 0
cgroup /sys/fs/cgroup/memory cgroup rw,relatime,memory 0 0
cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0
cgroup2 /sys/fs/cgroup/unified cgroup2 rw,relatime 0 0
"""
LIMITS = settle(Asked(cpu=0.5, memory_mb=64, pids=32), frozenset({"cpu", "memory", "pids", "disk"}))
EVERYTHING = frozenset(cgroups.CONTROLLERS)


def test_cgroup_mounts_are_told_from_others():
    found = cgroups.parse_hierarchies(HYBRID)
    assert [(str(root), version) for root, version, _ in found] == [
        ("/sys/fs/cgroup/memory", 1),
        ("/sys/fs/cgroup/cpu,cpuacct", 1),
        ("/sys/fs/cgroup/unified", 2),
    ]
    assert "cpu" in found[1][2]


def test_version_1_settings():
    hierarchy = Hierarchy(Path("/x"), 1, EVERYTHING)
    assert dict(settings(hierarchy, LIMITS)) == {
        "memory.limit_in_bytes": str(64 << 20),
        "memory.memsw.limit_in_bytes": str(64 << 20),
        "memory.kmem.tcp.limit_in_bytes": str(8 << 20),
        "pids.max": "32",
        "cpu.cfs_quota_us": "50000",
    }


def test_version_2_settings():
    hierarchy = Hierarchy(Path("/x"), 2, EVERYTHING)
    assert dict(settings(hierarchy, LIMITS)) == {
        "memory.max": str(64 << 20),
        "memory.swap.max": "0",
        "pids.max": "32",
        "cpu.max": "50000 100000",
    }


def test_version_1_that_does_not_count_sockets_says_so(tmp_path: Path):
    first, second = Hierarchy(tmp_path, 1, EVERYTHING), Hierarchy(tmp_path, 2, EVERYTHING)
    assert [text.split()[0] for text in cgroups.gaps([first])] == ["sockets"]
    assert cgroups.gaps([second]) == ()
    (tmp_path / "memory.kmem.tcp.limit_in_bytes").write_text("")
    assert cgroups.gaps([first]) == ()
    assert settle(Asked(), frozenset({"memory"}), ("sockets",)).degraded[-1] == "sockets"


def test_a_hierarchy_gets_only_what_it_controls():
    assert settings(Hierarchy(Path("/x"), 2, frozenset()), LIMITS) == []


@pytest.fixture
def unified(tmp_path: Path) -> Path:
    """A directory that looks like the root of a version 2 tree (this host may not have its controllers)."""
    root = tmp_path / "unified"
    root.mkdir()
    (root / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    (root / "cgroup.subtree_control").write_text("")
    mounts = tmp_path / "mounts"
    mounts.write_text(f"cgroup2 {root} cgroup2 rw 0 0\n")
    return mounts


def test_version_2_controllers_are_read_from_the_tree(unified: Path):
    (hierarchy,) = find_hierarchies(unified)
    assert hierarchy.version == 2
    assert hierarchy.controllers == EVERYTHING


def test_version_2_controllers_are_handed_down_before_the_group_is_made(unified: Path):
    groups = plan_groups(find_hierarchies(unified), "state", "sbx-1")
    root = groups[0].hierarchy.root
    for parent in (root / "dockyard", root / "dockyard" / "state"):
        parent.mkdir()
        (parent / "cgroup.subtree_control").write_text("")
    Groups(groups).create(LIMITS)
    for parent in (root, root / "dockyard", root / "dockyard" / "state"):
        assert (parent / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"
    assert (root / "dockyard/state/sbx-1/memory.max").read_text() == str(64 << 20)


def test_a_tree_that_hands_nothing_down_is_a_clear_error(unified: Path):
    groups = plan_groups(find_hierarchies(unified), "state", "sbx-1")
    with pytest.raises(CapacityError, match="sbx-1"):
        Groups(groups).create(LIMITS)  # the fake has no subtree_control in what it makes


def test_counters_are_read_from_either_version(tmp_path: Path):
    first, second = tmp_path / "v1", tmp_path / "v2"
    (first / "runtime").mkdir(parents=True)
    second.mkdir()
    (first / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    (first / "runtime" / "memory.oom_control").write_text("oom_kill_disable 0\noom_kill 1\n")
    (second / "pids.events").write_text("max 7\n")
    groups = Groups(
        [
            cgroups.Group(first, Hierarchy(first, 1, frozenset({"memory"}))),
            cgroups.Group(second, Hierarchy(second, 2, frozenset({"pids"}))),
        ]
    )
    assert groups.counters() == cgroups.Counters(oom_kills=3, refused_forks=7)


def test_no_groups_no_counters():
    assert Groups(()).counters() == cgroups.Counters()


def test_removing_what_is_not_there_is_no_error(tmp_path: Path):
    cgroups.remove_group(tmp_path / "absent")
    cgroups.remove_empty_parents([tmp_path], "absent")


def test_the_state_key_is_the_same_by_any_name(tmp_path: Path):
    (tmp_path / "link").symlink_to(tmp_path)
    assert cgroups.state_key(tmp_path / "link") == cgroups.state_key(tmp_path)
    assert cgroups.state_key(tmp_path) != cgroups.state_key(tmp_path / "other")


def test_old_empty_groups_of_any_state_go_and_young_or_used_ones_stay(tmp_path: Path):
    """Directories stand for groups here: the kernel, too, removes only what is empty."""
    top = tmp_path / TOP
    for name in ("gone/sbx-old", "idle", "live/sbx-young", "live/sbx-used/of-its-own"):
        (top / name).mkdir(parents=True)
    now_s = (top / "gone/sbx-old").stat().st_mtime
    remove_abandoned([tmp_path], now_s + 1)
    assert (top / "gone/sbx-old").exists()
    assert (top / "idle").exists()  # a user's, who cannot make it again, may be about to use it
    os.utime(top / "live/sbx-young", (now_s + ABANDONED_S, now_s + ABANDONED_S))
    remove_abandoned([tmp_path], now_s + ABANDONED_S + 1)
    assert {path.name for path in (top / "live").iterdir()} == {"sbx-young", "sbx-used"}
    assert not (top / "idle").exists()
    assert not (top / "gone/sbx-old").exists()
    remove_abandoned([tmp_path], now_s + 3 * ABANDONED_S)
    assert not (top / "gone").exists()
    assert {path.name for path in (top / "live").iterdir()} == {"sbx-used"}
