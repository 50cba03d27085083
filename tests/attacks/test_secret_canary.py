"""What is given to a command is seen by that command, and by the host's root."""

import secrets
from collections.abc import Iterator

import pytest

from bench.attack_cases.arena import Arena
from bench.attack_cases.model import Box, Probe
from sandbox import RunningCommand, Sandbox
from sandbox.errors import InvalidArgument

pytestmark = pytest.mark.parametrize("arena", ["function", "container"], indirect=True)


@pytest.fixture
def canary() -> str:
    return f"canary-{secrets.token_hex(16)}"


@pytest.fixture
def box(arena: Arena) -> Iterator[Sandbox]:
    with arena.sandbox(Box(alone=True)) as box:
        yield box


@pytest.fixture
def holder(box: Sandbox, canary: str) -> Iterator[RunningCommand]:
    """A command that has it in its environment and has read it from its input."""
    command = box.commands.start(
        "read -r line; [ $line = $TOKEN ] && touch ready; sleep 60",
        env={"TOKEN": canary},
        stdin=f"{canary}\n",
    )
    box.commands.run("until [ -e ready ]; do sleep 0.01; done")
    yield command
    command.kill()
    command.wait(30)


def seek(canary: str, *where: str) -> Probe:
    return Probe("paths", "find_in_processes", (canary[::-1], *where))


def test_no_ordinary_user_of_the_host_reads_it(arena: Arena, holder: RunningCommand, canary: str):
    assert arena.outside(seek(canary, "environ", "cmdline"), "user").said == "nowhere"
    assert arena.outside(seek(canary, "environ", "cmdline"), "root").opened


def test_it_is_in_no_argument(arena: Arena, holder: RunningCommand, canary: str):
    assert arena.outside(seek(canary, "cmdline"), "root").said == "nowhere"


def test_the_neighbour_does_not_see_it(arena: Arena, box: Sandbox, holder: RunningCommand, canary: str):
    assert arena.try_in(arena.neighbour, seek(canary, "environ", "cmdline")).said == "nowhere"
    assert arena.try_in(box, seek(canary, "environ", "cmdline")).opened


def test_nothing_that_is_kept_has_it(arena: Arena, holder: RunningCommand, canary: str):
    kept = [path for path in arena.state_dir.rglob("*") if path.is_file() and not path.is_symlink()]
    assert any(path.parent.name != "images" for path in kept)
    assert [path for path in kept if canary.encode() in path.read_bytes()] == []
    assert canary not in repr(holder)


def test_errors_do_not_repeat_it(box: Sandbox, canary: str):
    for env in ({"TO=KEN": canary}, {"TOKEN": f"{canary}\0"}, {"TOKEN": canary * 50_000}):
        with pytest.raises(InvalidArgument) as refused:
            box.commands.run("true", env=env)
        assert canary not in f"{refused.value} {refused.value.hint}"


def test_a_later_command_does_not_have_it(box: Sandbox, canary: str):
    box.commands.run("true", env={"TOKEN": canary})
    assert canary not in box.commands.run("env; cat /proc/[0-9]*/environ").stdout


def test_the_journal_is_its_owners(arena: Arena, box: Sandbox):
    """Records name processes and cgroups, and nobody else has a use for them."""
    records = list(arena.state_dir.rglob("*.json"))
    assert records
    assert all(path.stat().st_mode & 0o022 == 0 for path in records)
