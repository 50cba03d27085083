"""Real sandboxes. After each test, nothing may be left of any."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandbox import Sandbox
from sandbox.audit import check_integrity
from sandbox.native.build import build
from sandbox.places import default_state_dir, default_toolkit
from sandbox.toolkit import build_toolkit

Create = Callable[..., Sandbox]


def count_fds() -> int:
    """Open descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(scope="session")
def toolkit() -> Path:
    """The one that set-up has made; made now where it is missing or old."""
    build()
    place = default_toolkit(default_state_dir())
    build_toolkit(place)
    return place


@pytest.fixture(scope="session")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared, so that the image's skeleton is made once."""
    return tmp_path_factory.mktemp("state")


@pytest.fixture(params=["function", "container"])
def substrate(request: pytest.FixtureRequest) -> str:
    """Each test of a limit runs on both."""
    if request.param == "container" and os.geteuid() != 0:
        pytest.skip("substrate 'container' needs root")
    return request.param


@pytest.fixture
def create(state_dir: Path, toolkit: Path) -> Iterator[Create]:
    """Makes sandboxes, kills them at the end, and then looks for leftovers."""
    made: list[Sandbox] = []

    def create_one(**options: object) -> Sandbox:
        sandbox = Sandbox.create(state_dir=state_dir, toolkit=toolkit, **options)  # pyright: ignore
        made.append(sandbox)
        return sandbox

    num_fds = count_fds()
    yield create_one
    for sandbox in made:
        sandbox.kill()
    audit = check_integrity(state_dir)
    assert audit.leftovers == ()
    assert audit.live == ()
    assert count_fds() == num_fds


@pytest.fixture
def box(create: Create, substrate: str) -> Sandbox:
    """One sandbox with default limits, on each substrate."""
    return create(substrate=substrate)
