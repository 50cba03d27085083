"""Real sandboxes. After each test, nothing may be left of any."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sandbox_internet import NAMESERVER, Internet
from sandbox_places import assert_no_more_fds, count_fds, state_dir, toolkit

from sandbox import Policy, Sandbox
from sandbox.audit import check_integrity
from sandbox.egress import links
from sandbox.egress.build import build as build_egress
from sandbox.egress.service import Egress
from sandbox.layers.choice import drain

__all__ = ["state_dir", "toolkit"]  # fixtures

Create = Callable[..., Sandbox]


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
    drain()
    audit = check_integrity(state_dir)
    assert audit.leftovers == ()
    assert audit.live == ()
    assert_no_more_fds(num_fds)


@pytest.fixture
def box(create: Create, substrate: str) -> Sandbox:
    """One sandbox with default limits, on each substrate."""
    return create(substrate=substrate)


@pytest.fixture(scope="session")
def internet() -> Iterator[Internet]:
    """A network namespace that stands for the world, and routes between whoever is connected to it."""
    if os.geteuid() != 0:
        pytest.skip("a sandbox with a network needs root")
    build_egress()
    world = Internet()
    yield world
    world.close()


@pytest.fixture
def world() -> Iterator[Internet]:
    """Another one, for tests that change it."""
    if os.geteuid() != 0:
        pytest.skip("a sandbox with a network needs root")
    world = Internet()
    yield world
    world.close()


@pytest.fixture
def egress(internet: Internet, state_dir: Path, create: Create) -> Iterator[Egress]:
    """Connects sandboxes to `internet`; afterwards nothing may be left in it or in the kernel's maps."""
    internet.forget()
    service = Egress(state_dir, uplink=internet.path, nameserver=NAMESERVER, num_spare=1)
    yield service
    internet.forget()
    assert service.num_entries() == 0
    service.close()
    assert links.host_ends(internet.namespace) == ()
    assert internet.devices() == ["lo"]


@pytest.fixture
def connect(create: Create, egress: Egress) -> Iterator[Create]:
    """Makes a sandbox with these destinations, names or whole policy."""
    made: list[Sandbox] = []

    def connect_one(
        *destinations: dict[str, object], names: tuple[dict[str, object], ...] = (), **options: object
    ) -> Sandbox:
        network = {"destinations": destinations, "names": names}
        policy = options.pop("policy", None) or Policy.model_validate({"network": network})
        made.append(create(policy=policy, **{"egress": egress, **options}))
        return made[-1]

    yield connect_one
    for sandbox in made:
        sandbox.kill()
