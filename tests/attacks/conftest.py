"""One arena a substrate for a module's attacks. After each nothing of it may be left, after all nothing."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox_places import assert_no_more_fds, count_fds, state_dir, toolkit

from bench.attack_cases.arena import Arena
from sandbox.audit import check_integrity

__all__ = ["state_dir", "toolkit"]  # fixtures

MOUNTS, TAINT = Path("/proc/self/mountinfo"), Path("/proc/sys/kernel/tainted")


@pytest.fixture(scope="module")
def arena(request: pytest.FixtureRequest, state_dir: Path, toolkit: Path) -> Iterator[Arena]:
    """Parametrised by the substrate."""
    if request.param == "container" and os.geteuid() != 0:
        pytest.skip("substrate 'container' needs root")
    num_fds, mounts, taint = count_fds(), MOUNTS.read_text(), TAINT.read_text()
    with Arena(request.param, state_dir=state_dir, toolkit=toolkit) as arena:
        yield arena
    audit = check_integrity(state_dir)
    assert (audit.leftovers, audit.live) == ((), ())
    assert_no_more_fds(num_fds)
    assert (MOUNTS.read_text(), TAINT.read_text()) == (mounts, taint)
