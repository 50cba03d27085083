"""What holds of what was asked."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.errors import InvalidArgument, UnsupportedError
from sandbox.limits import MIB, Asked, LimitName, settle

ALL: frozenset[LimitName] = frozenset({"cpu", "memory", "pids", "disk"})


def test_defaults_hold_where_the_host_can_enforce_them():
    limits = settle(Asked(), ALL)
    assert (limits.cpus, limits.memory_bytes, limits.pids) == (1.0, 512 * MIB, 128)
    assert limits.disk_bytes == 256 * MIB
    assert limits.process_bytes is None
    assert limits.degraded == ()


def test_a_default_that_cannot_be_enforced_is_left_out_and_named():
    limits = settle(Asked(), frozenset({"pids", "disk"}))
    assert limits.cpus is None
    assert limits.memory_bytes is None
    assert limits.process_bytes == 512 * MIB
    assert [text.split()[0] for text in limits.degraded] == ["cpu", "memory"]


def test_a_written_limit_that_cannot_be_enforced_is_refused():
    with pytest.raises(UnsupportedError, match="memory_mb=64") as caught:
        settle(Asked(memory_mb=64), frozenset({"pids", "disk"}))
    assert caught.value.exit_code == 3
    assert "dockyard doctor" in caught.value.hint


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (Asked(cpu=0), "cpu=0"),
        (Asked(cpu=math.nan), "cpu=nan"),
        (Asked(cpu=math.inf), "cpu=inf"),
        (Asked(memory_mb=-1), "memory_mb=-1"),
        (Asked(pids=1), "pids=1"),
        (Asked(disk_mb=0), "disk_mb=0"),
        (Asked(lifetime_s=0), "lifetime_s=0"),
        (Asked(idle_s=-2), "idle_s=-2"),
    ],
)
def test_values_out_of_range_are_named(asked: Asked, field: str):
    with pytest.raises(InvalidArgument, match=field) as caught:
        settle(asked, ALL)
    assert caught.value.exit_code == 2
    assert caught.value.blame == "caller"


@given(
    st.floats(min_value=0.01, max_value=64),
    st.integers(min_value=16, max_value=1 << 20),
    st.integers(min_value=8, max_value=1 << 20),
    st.integers(min_value=1, max_value=1 << 20),
)
def test_what_was_asked_is_what_holds(cpu: float, memory_mb: int, pids: int, disk_mb: int):
    limits = settle(Asked(cpu, memory_mb, pids, disk_mb), ALL)
    assert (limits.cpus, limits.memory_bytes, limits.pids) == (cpu, memory_mb * MIB, pids)
    assert limits.disk_bytes == disk_mb * MIB
    assert limits.disk_inodes >= 1024


def test_bounds_are_said_without_exponents():
    with pytest.raises(InvalidArgument, match=r"use 16 to 16,777,216"):
        settle(Asked(memory_mb=1 << 60), ALL)
