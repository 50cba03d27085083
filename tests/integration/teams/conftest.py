import pytest

from evals.team_sandboxes import BoxConfig, Boxes
from sandbox.audit import leftovers
from sandbox.places import default_home, default_state_dir, default_toolkit
from sandbox.toolkit import build_toolkit


@pytest.fixture(scope="session")
def toolkit():
    """The toolkit that set-up makes; made here where it was not."""
    path = default_toolkit(default_state_dir())
    build_toolkit(path)
    return path


@pytest.fixture(scope="session")
def sources():
    """Where the published sources of bug tasks are kept between runs."""
    return default_home() / "cache"


@pytest.fixture(params=["function", "container"])
def substrate(request):
    return request.param


@pytest.fixture
def boxes(tmp_path, toolkit, substrate):
    """Real sandboxes; at the end nothing of them is left."""
    state = tmp_path / "state"
    yield Boxes(BoxConfig(substrate=substrate, state_dir=state, toolkit=toolkit, lifetime_s=300))
    assert not leftovers(state)
