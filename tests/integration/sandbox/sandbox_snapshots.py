"""Where snapshots are kept while a test runs."""

from pathlib import Path

import pytest

from sandbox import Snapshots
from sandbox.layers.choice import MECHANISMS


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
