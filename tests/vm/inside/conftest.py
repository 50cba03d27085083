"""These tests run in the guest of tests/vm/run.py and nowhere else."""

from pathlib import Path

import pytest

if not Path("/etc/dockyard-guest").exists():
    collect_ignore_glob = ["test_*.py"]


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
