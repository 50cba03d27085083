"""Sandboxes that begin with what another has written."""

import os
from collections.abc import Callable

import pytest
from sandbox_snapshots import kind, store

from sandbox import Sandbox, Snapshots, cgroups
from sandbox.errors import CapacityError, InvalidArgument
from sandbox.making import Made
from sandbox.sandbox import kill_all

__all__ = ["kind", "store"]  # fixtures

Create = Callable[..., Sandbox]
unified = next((each for each in cgroups.find_hierarchies() if each.version == 2), None)
pytestmark = pytest.mark.skipif(unified is None, reason="no cgroup version 2 here, which freezes")


@pytest.fixture
def fork(create: Create):
    """Forks, killed before the leftovers are counted."""
    made: list[Sandbox] = []

    def fork_one(box: Sandbox) -> Sandbox:
        made.append(box.fork_fs())
        return made[-1]

    yield fork_one
    for each in made:
        each.kill()


def test_a_fork_has_what_its_origin_had_and_nothing_that_either_writes_later(
    create: Create, substrate: str, kind: str, fork: Callable[[Sandbox], Sandbox]
):
    box = create(substrate=substrate, layer=kind, labels={"run": "7"}, memory_mb=128)
    box.files.write("/workspace/a", "one\n")
    child = fork(box)
    box.files.write("/workspace/a", "two\n")
    child.commands.run("cat /workspace/a > /workspace/b; rm /workspace/a; echo new > /workspace/c")
    assert box.commands.run("cd /workspace; cat a; ls").stdout == "two\na\n"
    assert child.commands.run("cd /workspace; cat b; ls").stdout == "one\nb\nc\n"
    assert child.info.limits == box.info.limits
    assert child.info.labels == {"run": "7"}
    grandchild = fork(child)
    assert (
        grandchild.commands.run("cat /workspace/c; hostname").stdout == f"new\n{grandchild.info.hostname}\n"
    )


def test_a_fork_is_somebody_else(
    create: Create, substrate: str, fork: Callable[[Sandbox], Sandbox], store: Snapshots
):
    box = create(substrate=substrate)
    box.commands.start("sleep 600", env={"TOKEN": "secret-of-the-origin"})
    first, second = fork(box), fork(box)
    assert len({box.id, first.id, second.id}) == 3
    assert len({each.info.hostname for each in (box, first, second)}) == 3
    assert first.info.made_from == box.id
    seen = first.commands.run("ps -eo args=; cat /proc/[0-9]*/environ | tr '\\0' '\\n'").stdout
    assert "sleep 600" not in seen
    assert "secret-of-the-origin" not in seen
    script = "import socket; print(socket.gethostname(), socket.gethostbyname(socket.gethostname()))"
    assert first.commands.run(["python3", "-c", script]).stdout == f"{first.info.hostname} 127.0.0.1\n"
    first.snapshot("of-a-fork")
    other = create(substrate=substrate, snapshot="of-a-fork")
    assert other.commands.run(["python3", "-c", script]).stdout == "dockyard 127.0.0.1\n"
    owners = {each._made.first_id for each in (box, first, second)}
    assert len(owners) == 3 or os.geteuid() != 0
    drawn = [each.commands.run("head -c 16 /dev/urandom | sha256sum").stdout for each in (first, second)]
    assert drawn[0] != drawn[1]


def test_several_forks_at_once(create: Create):
    box = create()
    box.files.write("/workspace/a", "x")
    forks = box.fork_fs(3)
    try:
        assert [each.files.read("/workspace/a") for each in forks] == [b"x"] * 3
        assert len({each.id for each in forks}) == 3
    finally:
        for each in forks:
            each.kill()
    for number in (0, 101):
        with pytest.raises(InvalidArgument, match=f"n={number}"):
            box.fork_fs(number)


def test_several_forks_end_together_whatever_the_end_of_one_raises(create: Create):
    forks = create().fork_fs(3)
    held = [CapacityError(f"{each.id}: the kernel holds on to a cgroup") for each in forks]
    try:
        for each, error in list(zip(forks, held, strict=True))[:2]:
            each._release_error = error  # as its release leaves it
        with pytest.raises(CapacityError) as caught:
            kill_all(forks)
        assert caught.value is held[0]
        assert [each.is_running for each in forks] == [False] * 3
    finally:
        for each in forks:
            each._release_error = None
            each.kill()


def test_none_is_idle_that_a_fork_is_made_of_or_that_waits_for_the_last(create: Create, monkeypatch):
    box = create(idle_s=1000)
    made: list[Sandbox] = []
    idle: list[Sandbox] = []

    def is_idle(each: Sandbox) -> bool:
        return each._life.deadline_ns() not in (None, each._life._expires_ns)  # None: held for its copy

    class Seen(Sandbox):
        def __init__(self, made_of: Made) -> None:
            idle.extend(each for each in (box, *made) if is_idle(each))
            super().__init__(made_of)
            made.append(self)

    monkeypatch.setattr("sandbox.sandbox.Sandbox", Seen)
    forks = box.fork_fs(3)
    assert list(forks) == made
    assert idle == []
    assert all(is_idle(each) for each in (box, *forks))  # again
    for fork in forks:
        fork.kill()


def test_a_fork_has_the_network_that_holds_now(connect: Create, substrate: str):
    """Not the one that its origin was made with, which may have allowed more."""
    box = connect({"to": "192.0.2.1", "ports": [80]}, substrate=substrate)
    box.set_network("none", 1)
    child = box.fork_fs()
    try:
        network = child.info.policy.network
        assert network != "none"
        assert network.destinations == ()
        assert child._ownership._record.links == (child._ownership.connection.link.name,)
    finally:
        child.kill()
