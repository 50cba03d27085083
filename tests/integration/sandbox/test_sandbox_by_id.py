"""Sandboxes by their id: found again, listed, given more time, ended; by their owner and by others."""

import json
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sandbox_owner import Owner, owned

from sandbox import Sandbox, sandboxes
from sandbox.audit_log import entries
from sandbox.door import ask
from sandbox.door_names import name_of
from sandbox.errors import (
    AuthError,
    InvalidArgument,
    SandboxError,
    SandboxGone,
    SandboxNotFound,
    UnsupportedError,
)
from sandbox.processes import find_process, this_process

Create = Callable[..., Sandbox]
NOBODY = 65534


@pytest.fixture
def other(tmp_path: Path, toolkit: Path) -> Iterator[Owner]:
    with owned(tmp_path, toolkit) as owner:
        yield owner


def test_a_sandbox_is_found_again_by_its_id(create: Create, state_dir: Path):
    box = create(lifetime_s=99)
    end_at = box.get_info().end_at
    again = Sandbox.connect(box.id, state_dir=state_dir)
    again.files.write("a", "x")
    assert box.files.read("a") == b"x"
    assert abs((again.get_info().end_at - end_at).total_seconds()) < 5  # no side effect on its lifetime
    box.pause()
    assert Sandbox.connect(box.id, state_dir=state_dir).is_paused
    assert box.get_info().state == "paused"


def test_ids_that_lead_nowhere_say_where_they_do_not(create: Create, state_dir: Path, tmp_path: Path):
    box = create()
    with pytest.raises(SandboxNotFound):
        Sandbox.connect(box.id, state_dir=tmp_path)
    for bad in ("", "../../etc/passwd", "sbx-1", f"{box.id}\n", f"{box.id}/x"):
        with pytest.raises(InvalidArgument, match="id="):
            Sandbox.connect(bad, state_dir=state_dir)
    box.kill()
    for _ in range(2):
        with pytest.raises(SandboxGone) as caught:
            Sandbox.connect(box.id, state_dir=state_dir)
        assert (caught.value.reason, caught.value.sandbox_id) == ("killed", box.id)
    with pytest.raises(SandboxGone):
        box.get_info()
    with pytest.raises(SandboxGone):
        box.set_timeout(5)


def test_a_list_has_those_with_all_labels(create: Create, state_dir: Path):
    red, blue = (create(labels={"team": team, "run": "7"}) for team in ("red", "blue"))
    assert {each.id for each in Sandbox.list(state_dir=state_dir)} == {red.id, blue.id}
    found = Sandbox.list(labels={"team": "red", "run": "7"}, state_dir=state_dir)
    assert [(each.id, each.labels) for each in found] == [(red.id, {"team": "red", "run": "7"})]
    assert Sandbox.list(labels={"team": "red", "run": "8"}, state_dir=state_dir) == ()
    red.kill()
    assert {each.id for each in Sandbox.list(state_dir=state_dir)} == {blue.id}


def test_effective_timeouts_are_echoed(create: Create, state_dir: Path):
    box = create(lifetime_s=600, idle_s=300)
    before = box.get_info()
    assert (before.lifetime_s, before.idle_s, before.owner_pid) == (600, 300, os.getpid())
    assert before.started_at is not None
    assert before.end_at is not None
    assert before.started_at <= datetime.now(UTC) < before.end_at
    after = box.set_timeout(60)
    assert after.idle_s == 300
    assert after.end_at is not None
    assert 50 < (after.end_at - datetime.now(UTC)).total_seconds() < 61
    assert box.set_timeout(idle_s=None).idle_s is None
    longer = box.set_timeout(3600, idle_s=7)
    assert (longer.idle_s, longer.lifetime_s > 3600) == (7, True)
    deeds = [
        each for each in entries(state_dir) if each["sandbox"] == box.id and each["deed"] == "set_timeout"
    ]
    assert [(each["lifetime_s"], each["idle_s"]) for each in deeds] == [
        (60, "keep"), (None, None), (3600, 7),
    ]  # fmt: skip


@pytest.mark.parametrize(("lifetime_s", "idle_s"), [(0, "keep"), (-1, "keep"), (float("nan"), 1), (None, 0)])
def test_times_out_of_range_change_nothing(create: Create, lifetime_s, idle_s):
    box = create(lifetime_s=600)
    with pytest.raises(InvalidArgument, match=r"lifetime_s|idle_s"):
        box.set_timeout(lifetime_s, idle_s=idle_s)
    assert (box.get_info().lifetime_s, box.get_info().idle_s) == (600, None)


def test_a_shorter_lifetime_ends_it_and_a_longer_one_does_not(create: Create):
    box = create(lifetime_s=1.0)
    box.set_timeout(600)
    running = box.commands.start("sleep 1.5")
    assert running.wait(60).reason == "exit"
    running = box.commands.start("sleep 600", timeout_s=600)
    box.set_timeout(0.05)
    assert running.wait(60).reason == "killed"
    box._channel.join(60)
    assert box.ended is not None
    assert box.ended.reason == "expired"


def test_an_idle_time_is_set_later(create: Create):
    box = create()
    box.set_timeout(idle_s=0.05)
    box._channel.join(60)
    assert box.ended is not None
    assert box.ended.reason == "idle"


def test_another_process_sees_it_and_cannot_use_it(other: Owner, tmp_path: Path):
    (seen,) = Sandbox.list(state_dir=tmp_path, labels={"team": "red"})
    assert (seen.id, seen.owner_pid, seen.state) == (other.id, other.process.pid, "running")
    assert sandboxes.info(other.id, state_dir=tmp_path).labels == {"team": "red"}
    with pytest.raises(UnsupportedError, match=f"owned by process {other.process.pid}") as caught:
        Sandbox.connect(other.id, state_dir=tmp_path)
    assert "sandboxes.attach" in caught.value.hint


def test_another_process_gives_it_time_and_ends_it(other: Owner, tmp_path: Path):
    after = sandboxes.set_timeout(other.id, 1200, idle_s=100, state_dir=tmp_path)
    assert after.idle_s == 100
    assert after.lifetime_s is not None
    assert 1200 <= after.lifetime_s < 1300
    with pytest.raises(InvalidArgument, match="lifetime_s=-5"):
        sandboxes.set_timeout(other.id, -5, state_dir=tmp_path)
    assert sandboxes.kill(other.id, state_dir=tmp_path).id == other.id
    assert other.line() == "killed killed"
    assert Sandbox.list(state_dir=tmp_path) == ()
    for _ in range(2):  # its owner knows, and then its log does
        with pytest.raises(SandboxGone) as caught:
            sandboxes.kill(other.id, state_dir=tmp_path)
        assert caught.value.reason == "killed"
        other.end()


def test_when_its_owner_has_died_it_is_lost(other: Owner, tmp_path: Path):
    other.end()
    with pytest.raises(SandboxGone) as caught:
        sandboxes.info(other.id, state_dir=tmp_path)
    assert caught.value.reason == "lost"
    assert Sandbox.list(state_dir=tmp_path) == ()


def test_an_owner_that_is_stopped_is_listed_by_what_the_journal_knows(
    other: Owner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sandbox.door.ask.__defaults__", (0.2,))
    os.kill(other.process.pid, 19)
    (seen,) = Sandbox.list(state_dir=tmp_path)
    assert (seen.id, seen.state, seen.end_at) == (other.id, "unknown", None)
    with pytest.raises(UnsupportedError, match="does not answer"):
        sandboxes.info(other.id, state_dir=tmp_path)
    os.kill(other.process.pid, 18)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_gets_no_answer(other: Owner, tmp_path: Path):
    owner = find_process(other.process.pid)
    assert owner is not None
    os.seteuid(NOBODY)
    try:
        with pytest.raises(AuthError, match=f"uid {NOBODY}"):
            ask(owner, {"do": "list", "state_dir": str(tmp_path)})
        with pytest.raises(AuthError):
            Sandbox.list(state_dir=tmp_path)
    finally:
        os.seteuid(0)
    assert [each.id for each in Sandbox.list(state_dir=tmp_path)] == [other.id]


def test_whoever_has_taken_the_name_is_not_believed():
    """The journal says which process owns a sandbox; the kernel says which one answers."""
    with (
        subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as squatter,
    ):
        owner = find_process(process.pid)
        assert owner is not None
        squatter.bind(name_of(owner))
        squatter.listen(1)
        with pytest.raises(UnsupportedError, match="answers in its place"):
            ask(owner, {"do": "list", "state_dir": "/"})


@pytest.mark.parametrize(
    "request_",
    [
        b"\n", b"[]\n", b"{}\n", b"null\n", b'{"do": "fly", "id": "sbx-1", "state_dir": "/"}\n',
        b'{"do": "info", "id": 7, "state_dir": 8}\n', b"\xff\n", b"{" * 2000 + b"\n", b"x" * 100_000 + b"\n",
    ],
    ids=lambda request: f"{len(request)}-{request[:6]!r}",
)  # fmt: skip
def test_the_door_outlives_what_is_no_request(create: Create, state_dir: Path, request_: bytes):
    box = create()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(30)
        connection.connect(name_of(this_process()))
        try:
            connection.sendall(request_)
            said = connection.recv(1 << 16)
        except (BrokenPipeError, ConnectionResetError):
            said = b""
    assert b"error" in said or said == b""
    answer = ask(this_process(), {"do": "info", "id": box.id, "state_dir": str(state_dir)})
    assert answer["id"] == box.id


def test_a_request_of_another_kind_of_value_is_refused(create: Create, state_dir: Path):
    box = create(lifetime_s=600)
    for bad in ("5", True, [5], {"a": 1}):
        with pytest.raises(SandboxError, match="no number of seconds"):
            ask(
                this_process(),
                {
                    "do": "set_timeout",
                    "id": box.id,
                    "state_dir": str(state_dir),
                    "lifetime_s": bad,
                    "idle_s": 1,
                },
            )
    assert box.get_info().lifetime_s == 600


def test_nothing_that_is_said_has_the_environment(other: Owner, tmp_path: Path):
    owner = find_process(other.process.pid)
    assert owner is not None
    for request in ({"do": "list"}, {"do": "info", "id": other.id}):
        assert "canary" not in json.dumps(ask(owner, {**request, "state_dir": str(tmp_path)}))


def test_one_door_serves_all_of_a_process(create: Create):
    boxes = [create() for _ in range(3)]
    assert sum(thread.name == "dockyard-door" for thread in threading.enumerate()) == 1
    assert len({box.id for box in boxes}) == 3
