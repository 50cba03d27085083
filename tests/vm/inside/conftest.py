"""These tests run in the guest of tests/vm/run.py and nowhere else."""

import os
import shutil
from pathlib import Path

import pytest

LANE = int(os.environ.get("DOCKYARD_LANE", "0"))

if not Path("/etc/dockyard-guest").exists():
    collect_ignore_glob = ["test_*.py"]


def pytest_addoption(parser):
    parser.addoption("--every-attack", action="store_true", help="also those that other kernels show as well")


def pytest_configure(config):
    config.addinivalue_line("markers", "every_attack: with --every-attack alone")


def pytest_collection_modifyitems(config, items):
    """Two guests run side by side: this one takes its half, sandboxes of a kind together."""
    every = config.getoption("--every-attack")
    mine = [
        item
        for item in items
        if ("container" in item.nodeid) == (LANE == 1)
        and (every or item.get_closest_marker("every_attack") is None)
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in mine])
    items[:] = mine


@pytest.fixture(params=["function", "container"])
def substrate(request):
    """Every test of a sandbox runs on both."""
    return request.param


@pytest.fixture
def create(substrate):
    """Makes sandboxes, kills them at the end, and then looks for leftovers."""
    from sandbox import Sandbox
    from sandbox.audit import check_integrity
    from sandbox.places import default_state_dir

    made = []

    def make(**options):
        made.append(Sandbox.create(substrate=substrate, toolkit=Path("/opt/toolkit"), **options))
        return made[-1]

    yield make
    for box in made:
        box.kill()
    assert check_integrity(default_state_dir()).leftovers == ()


@pytest.fixture(scope="module")
def arena(request):
    """One a substrate for all attacks on it; afterwards nothing may be left of any."""
    from bench.attack_cases.arena import Arena
    from sandbox import sandboxes
    from sandbox.audit import check_integrity
    from sandbox.guard.node import shared_guard
    from sandbox.places import default_state_dir
    from sandbox.sealed import sealed_copy

    fds, mounts = Path("/proc/self/fd"), Path("/proc/self/mountinfo")
    shared_guard(), sandboxes.open_door(), sealed_copy(shutil.which("crun"))  # whose descriptors stay
    before = len(list(fds.iterdir())), mounts.read_text()
    with Arena(request.param, state_dir=default_state_dir(), toolkit=Path("/opt/toolkit")) as arena:
        yield arena
    audit = check_integrity(default_state_dir())
    assert (audit.leftovers, audit.live) == ((), ())
    assert (len(list(fds.iterdir())), mounts.read_text()) == before
