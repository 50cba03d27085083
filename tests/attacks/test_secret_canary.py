"""What is given to a command is seen by that command, and by the host's root."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.attack_cases.arena import Arena
from bench.attack_cases.model import Box, Probe
from sandbox import RunningCommand, Sandbox
from sandbox.errors import InvalidArgument
from sandbox.journal import Journal, Record

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


# What of a process shows its memory, its variables, or where it is.
PRIVATE = ("environ", "mem", "maps", "auxv", "fd", "fdinfo/0", "root", "cwd", "syscall", "stack", "io")
OWNER = """
import sys
from sandbox import Sandbox
substrate, state_dir, toolkit = sys.argv[1:]
with Sandbox.create(substrate=substrate, state_dir=state_dir, toolkit=toolkit) as box:
    token = sys.stdin.readline().strip()
    running = box.commands.start("touch ready; exec sleep 1000", env={"TOKEN": token})
    box.commands.run("until [ -e ready ]; do sleep 0.01; done")
    print(box.id, flush=True)
    sys.stdin.readline()
"""


@dataclass(frozen=True, slots=True)
class Held:
    """A sandbox and the process that owns it; that has a secret in its environment, and has given one to a
    command."""

    owner: int
    record: Record

    @property
    def pids(self) -> tuple[int, ...]:
        """Owner, launcher where one stays, init, minder, command."""
        inside = (int(pid) for group in self.record.cgroups[:1] for pid in _members(group))
        return (self.owner, *(key.pid for key in self.record.processes), *inside)


@contextmanager
def owned(arena: Arena, own_secret: str, given: str) -> Iterator[Held]:
    words = [sys.executable, "-c", OWNER, arena.substrate, str(arena.state_dir), str(arena.toolkit)]
    environment = {**os.environ, "OWN_SECRET": own_secret}
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        owner.stdin.write(f"{given}\n")
        owner.stdin.flush()
        sandbox_id = owner.stdout.readline().strip()
        (record,) = (each for each in Journal(arena.state_dir).records() if each.id == sandbox_id)
        try:
            yield Held(owner.pid, record)
        finally:
            owner.stdin.close()


def _members(group: str) -> list[str]:
    return Path(group, "cgroup.procs").read_text().split()


def test_owner_and_launcher_show_an_ordinary_user_nothing(arena: Arena, canary: str):
    """Neither what is theirs nor what they have passed on, whatever file of /proc is tried."""
    with owned(arena, canary, f"given-{canary}") as held:
        paths = (f"/proc/{pid}/{name}" for pid in held.pids for name in PRIVATE)
        probe = Probe("paths", "open_any", ("read", *paths))
        assert len(set(held.pids)) >= (5 if arena.substrate == "function" else 4)
        said = set(arena.outside(probe, "user").said.split())
        assert "EACCES" in said
        assert said <= {"EACCES", "EPERM", "ENOENT", "ESRCH"}  # one that has just ended shows nothing either
        assert arena.outside(probe, "root").opened
        assert arena.outside(seek(canary, "environ", "cmdline"), "user").said == "nowhere"


def test_what_is_the_owners_goes_no_further_than_the_owner(arena: Arena, canary: str):
    """To no process of its sandbox, not even where root looks; nor into an argument of any."""
    with owned(arena, canary, "given") as held:
        holders = {pid for pid in held.pids if _has(pid, "environ", canary)}
        assert holders == {held.owner}
        assert not any(_has(pid, "cmdline", canary) for pid in held.pids)


def test_what_is_given_to_a_command_is_in_that_command_alone(arena: Arena, canary: str):
    """Its owner has it in its memory; neither launcher nor init nor minder has it where others look."""
    with owned(arena, "own", canary) as held:
        holders = {pid for pid in held.pids if _has(pid, "environ", canary)}
        assert holders
        assert {Path(f"/proc/{pid}/comm").read_text() for pid in holders} <= {"bash\n", "sleep\n"}
        assert not any(_has(pid, "cmdline", canary) for pid in held.pids)


def _has(pid: int, name: str, text: str) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
        return text.encode() in Path(f"/proc/{pid}/{name}").read_bytes()
    return False
