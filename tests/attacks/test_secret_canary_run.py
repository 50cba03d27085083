"""What sandboxes are given for a run is in nothing that the run writes or says: events, mail, records, the
audit log, the logs of servers and workers, errors, and what other users see of processes."""

import asyncio
import json
import logging
import os
import pickle
import secrets
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.attack_cases.arena import Arena
from bench.attack_cases.model import Probe
from cluster.state import StateFolder
from evals.store import Store
from evals.team_record import TeamRecord
from evals.team_sandboxes import BoxConfig, Boxes
from protocol.errors import DockyardError
from sandbox import Policy, Sandbox
from sandbox.audit_log import entries
from sandbox.errors import CommandError
from teams.harness.task import RunOptions, TeamOutcome, TeamTask, run_program
from teams.member import Ending, Member
from teams.team import Verdict
from teams.workspace import Tree

START_S = 180.0
# Shows that a command has it, and shows nothing of it.
HAS_IT = 'printf %s "$TOKEN" | sha256sum | cut -c1-16 | tee -a /workspace/sums'
SMALL = "workers: {threads: 1, kv_cache_bytes: 134217728}\nray: {object_store_bytes: 104857600}\n"


@pytest.fixture
def canary() -> str:
    return f"canary-{secrets.token_hex(16)}"


def holders(folder: Path, canary: str) -> list[Path]:
    """Files below it that have the text. The kernel's and sockets are not read."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    assert files, f"nothing was written to {folder}"
    return [path for path in files if canary.encode() in path.read_bytes()]


def test_whoever_looks_finds_it_where_it_is(tmp_path: Path, canary: str):
    """The control of all that follows."""
    (tmp_path / "log").write_text(f"{{'token': '{canary}'}}")
    assert holders(tmp_path, canary) == [tmp_path / "log"]


class Unneeded:
    """A model that no program of this test asks."""

    async def close(self) -> None: ...

    async def complete(self, *args: object, **options: object) -> None:
        raise AssertionError("nobody asks it")


async def worker(member: Member) -> Ending:
    """Uses what it has, fails in every way that a command can, and tells the lead."""
    await member.run(HAS_IT, timeout_s=30)
    for command in ("exit 3", "kill -9 $$", "no-such-program", "sleep 30"):
        await member.run(command, timeout_s=0.3)
    return Ending("done")


async def lead(member: Member) -> Ending:
    member.spawn("ada", worker, "use the token")
    await worker(member)
    return Ending("done")


@pytest.mark.parametrize("arena", ["function", "container"], indirect=True)
def test_nothing_of_a_teams_run_has_it(
    arena: Arena,
    tmp_path: Path,
    canary: str,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
):
    boxes = Boxes(
        BoxConfig(
            substrate=arena.substrate, state_dir=tmp_path / "state", toolkit=arena.toolkit,
            env={"TOKEN": canary},
        )
    )  # fmt: skip
    said: list[str] = []

    async def verify(diff: object) -> Verdict:
        said.append(repr(diff))
        return Verdict(True, "checked")

    task = TeamTask("canary", "use the token", Tree({"a": b"1"}), boxes, verify)
    options = RunOptions(events_path=tmp_path / "events.jsonl", progress=said.append)
    with caplog.at_level(logging.DEBUG), Store(tmp_path / "runs.db") as store:
        with TeamRecord(store, "canary", {"model": "none"}) as record:
            result, log = asyncio.run(run_program(task, lead, lambda agent: Unneeded(), options))
            record.keep(TeamOutcome("canary", replay=False, result=result, events=log))
        assert store.run(record.run_id).status == "finished"
    commands = [each for each in entries(tmp_path / "state") if each["deed"] == "exec"]
    assert len(commands) >= 10
    assert holders(tmp_path, canary) == []
    out, err = capfd.readouterr()
    assert canary not in "".join((*said, out, err, caplog.text, repr(boxes), repr(result), repr(task)))


@pytest.mark.parametrize("arena", ["function", "container"], indirect=True)
def test_a_command_has_it_and_other_users_do_not_see_it(arena: Arena, canary: str):
    with sandbox(arena, canary) as box:
        running = box.commands.start("touch ready; exec sleep 600")
        box.commands.run("until [ -e ready ]; do sleep 0.01; done")
        assert box.commands.run("printf %s $TOKEN").stdout == canary
        assert box.sessions.create().run("printf %s $TOKEN").stdout == canary
        probe = Probe("paths", "find_in_processes", (canary[::-1], "environ", "cmdline"))
        assert arena.outside(probe, "user").said == "nowhere"
        assert arena.outside(probe, "root").opened
        assert arena.try_in(arena.neighbour, probe).said == "nowhere"
        running.kill()


@contextmanager
def sandbox(arena: Arena, canary: str) -> Generator[Sandbox]:
    with Sandbox.create(
        substrate=arena.substrate, state_dir=arena.state_dir, toolkit=arena.toolkit,
        policy=Policy(max_timeout_s=600), env={"TOKEN": canary}, labels={"team": "red"},
    ) as box:  # fmt: skip
        yield box


@pytest.mark.parametrize("arena", ["function"], indirect=True)
def test_no_error_and_no_description_says_it(arena: Arena, canary: str):
    caught: list[DockyardError] = []
    with sandbox(arena, canary) as box:
        deeds = (
            lambda: box.commands.run("echo $TOKEN; exit 3", check=True),
            lambda: box.commands.run("echo $TOKEN; sleep 60", timeout_s=0.2, check=True),
            lambda: box.commands.run("true", timeout_s=700),
            lambda: box.commands.run("true", cwd="/nowhere"),
            lambda: box.commands.run("true", env={"TO=KEN": canary}),
            lambda: box.files.read("/nowhere"),
            lambda: Sandbox.create(
                env={"TOKEN": f"{canary}\0"}, state_dir=arena.state_dir, toolkit=arena.toolkit
            ),
            lambda: Sandbox.create(
                env={"TOKEN": canary}, memory_mb=0, state_dir=arena.state_dir, toolkit=arena.toolkit
            ),
            lambda: Sandbox.create(
                env={"TOKEN": canary}, state_dir=arena.state_dir, toolkit=Path("/nowhere")
            ),
        )
        for deed in deeds:
            try:
                deed()
            except DockyardError as error:
                caught.append(error)
        for info in (box.info, box.get_info(), box._made.order, Sandbox.list(state_dir=arena.state_dir)):
            assert canary not in repr(info)
    assert len(caught) == len(deeds)
    for error in caught:
        told = (str(error), repr(error), error.hint, json.dumps(error.record()))
        assert canary not in "".join((*told, *traceback.format_exception(error)))
        if not isinstance(error, CommandError):  # which carries what the command has printed
            assert canary.encode() not in pickle.dumps(error)
    assert holders(arena.state_dir, canary) == []


@pytest.mark.parametrize("arena", ["function"], indirect=True)
def test_another_order_under_a_key_does_not_tell_the_first_ones(arena: Arena, canary: str):
    options = {"state_dir": arena.state_dir, "toolkit": arena.toolkit, "key": f"key-{canary[-6:]}"}
    with Sandbox.create(env={"TOKEN": canary}, **options):
        with pytest.raises(DockyardError, match="another env") as caught:
            Sandbox.create(env={"TOKEN": "other"}, **options)
        assert canary not in str(caught.value)


class Server:
    """A real deployment in a home of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        (home / "small.yaml").write_text(SMALL)
        words = ("serve", "smollm2", "--port", "0", "--json", "--config", str(home / "small.yaml"))
        with (home / "serve.log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "cli.main", *words], env=environment(home), stdout=subprocess.PIPE,
                stderr=log, text=True, start_new_session=True,
            )  # fmt: skip
        assert self.process.stdout is not None
        if not self.process.stdout.readline():
            self.end()
            pytest.fail((home / "serve.log").read_text()[-2000:])
        (self.record,) = StateFolder(home).records()

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(START_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


def environment(home: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "DOCKYARD_HOME": str(home), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", **more}


@pytest.fixture
def server(tmp_path: Path, toolkit: Path, smollm2_file: Path) -> Iterator[Server]:
    home = tmp_path / "home"
    home.mkdir()
    (home / "toolkit").symlink_to(toolkit)
    running = Server(home)
    yield running
    if running.process.poll() is None:
        running.end()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("arena", ["function"], indirect=True)
def test_a_served_teams_run_leaves_it_nowhere(arena: Arena, server: Server, canary: str):
    """Gateway, workers, Ray, command line: the whole product, with a team of samplers."""
    words = ("team", "run", "HumanEval/0", "--samples", "1", "--env", "CANARY", "--json")
    run = subprocess.Popen(
        [sys.executable, "-m", "cli.main", *words], env=environment(server.home, CANARY=canary), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    seen: list[str] = []
    probe = Probe("paths", "find_in_processes", (canary[::-1], "environ", "cmdline"))

    def look() -> None:
        while run.poll() is None and len(seen) < 5:
            seen.append(arena.outside(probe, "user").said)

    watcher = threading.Thread(target=look)
    watcher.start()
    out, err = run.communicate(timeout=START_S)
    watcher.join()
    assert json.loads(out.splitlines()[-1])["agents"], err[-2000:]
    assert set(seen) == {"nowhere"}
    assert canary not in out + err
    made = [each for each in entries(StateFolder(server.home).sandboxes) if each["deed"] == "create"]
    assert len(made) >= 2
    scratch = Path(server.record.scratch)
    assert holders(scratch, canary) == []
    server.end()
    assert holders(server.home, canary) == []
