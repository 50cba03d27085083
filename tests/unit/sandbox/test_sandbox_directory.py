"""Sandboxes of one process by id, without any real one."""

import os
import signal
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sandbox_places import no_descriptor_left

from sandbox import directory
from sandbox.directory import Directory
from sandbox.door import Door
from sandbox.errors import CapacityError, SandboxError, SandboxGone, SandboxNotFound
from sandbox.journal import Journal, Record
from sandbox.processes import boot_id, find_process
from sandbox.status import SandboxStatus, at, status_of

STATE = Path("/state")
ID = "sbx-00000000000000a"
TIMES = st.none() | st.datetimes(timezones=st.just(UTC))


@dataclass
class Box:
    """What a directory knows of a sandbox."""

    id: str = ID
    ended: SandboxGone | None = None
    calls: list[object] = field(default_factory=list[object])

    def get_info(self) -> SandboxStatus:
        if self.ended is not None:
            raise self.ended
        return SandboxStatus(self.id, 1, "running", labels={"a": "1", "b": "2"})

    def set_timeout(self, lifetime_s=None, *, idle_s="keep") -> SandboxStatus:
        self.calls.append((lifetime_s, idle_s))
        return self.get_info()

    def kill(self) -> None:
        self.calls.append("kill")


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> "Directory[Box]":
    monkeypatch.setattr("sandbox.door.Door.open", lambda self: True)
    return Directory()


def gone(reason="killed") -> SandboxGone:
    return SandboxGone("it has ended", reason=reason, sandbox_id=ID)


def test_one_that_has_ended_is_gone_and_not_unknown(known: "Directory[Box]"):
    box = Box()
    known.add(STATE, box)
    assert known.connect(ID, state_dir=STATE) is box
    known.remove(STATE, ID, gone("idle"))
    seen = []
    for _ in range(2):
        with pytest.raises(SandboxGone) as caught:
            known.connect(ID, state_dir=STATE)
        assert caught.value.reason == "idle"
        seen.append(caught.value)
    assert seen[0] is not seen[1]  # whoever caught the first does not live on in the second
    assert known.own(STATE) == ()


def test_one_that_ends_before_it_is_added_is_not_kept(known: "Directory[Box]"):
    known.add(STATE, Box(ended=gone("lost")))
    assert known.own(STATE) == ()
    with pytest.raises(SandboxGone):
        known.find(STATE, ID)


def test_a_state_directory_has_its_own(known: "Directory[Box]", tmp_path: Path):
    known.add(STATE, Box())
    with pytest.raises(SandboxNotFound):
        known.connect(ID, state_dir=tmp_path)


def test_a_list_leaves_out_what_ends_meanwhile(known: "Directory[Box]", tmp_path: Path):
    first, second = Box(), Box("sbx-00000000000000b")
    known.add(tmp_path, first)
    known.add(tmp_path, second)
    first.ended = gone()
    assert [each.id for each in known.list(state_dir=tmp_path)] == [second.id]
    assert known.list(labels={"a": "1", "b": "2"}, state_dir=tmp_path)
    assert known.list(labels={"a": "2"}, state_dir=tmp_path) == ()
    assert known.list(labels={"c": ""}, state_dir=tmp_path) == ()


def test_a_want_of_descriptors_is_told(known: "Directory[Box]", tmp_path: Path):
    owner = find_process(os.getppid())
    assert owner is not None
    Journal(tmp_path).write(Record(ID, owner, boot_id(), "function", cgroups=()))
    for look in (known.attach, known.info, known.kill):
        with no_descriptor_left(), pytest.raises(CapacityError, match="for a sandbox: Too many open files"):
            look(ID, state_dir=tmp_path)
    with no_descriptor_left(), pytest.raises(CapacityError, match="for sandboxes: Too many open files"):
        known.list(state_dir=tmp_path)


@pytest.mark.parametrize(
    "error", [CapacityError("as many as it can"), SandboxError("no request that is understood"), None]
)
def test_an_owner_that_answers_with_an_error_is_listed_by_id(tmp_path: Path, error: SandboxError | None):
    """None: with what is no answer."""
    is_open, opened = os.pipe()
    if (owner := os.fork()) == 0:

        def answer(request, has_left, tell) -> str:
            if error is not None:
                raise error
            return "none"

        try:
            Door(answer).open()
            os.write(opened, b"x")
            signal.pause()
        finally:
            os._exit(2)
    try:
        assert os.read(is_open, 1) == b"x"
        key = find_process(owner)
        assert key is not None
        Journal(tmp_path).write(Record(ID, key, boot_id(), "function", cgroups=()))
        assert Directory[Box]().list(state_dir=tmp_path) == (SandboxStatus(ID, owner),)
    finally:
        os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)
        os.close(is_open)
        os.close(opened)


def test_only_so_many_ended_ones_are_remembered(known: "Directory[Box]", monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(directory, "MAX_ENDED", 3)
    for number in range(10):
        box = Box(f"sbx-{number:015x}")
        known.add(STATE, box)
        known.remove(STATE, box.id, gone())
    assert known.find(STATE, f"sbx-{0:015x}") is None
    with pytest.raises(SandboxGone):
        known.find(STATE, f"sbx-{9:015x}")


def test_by_id_its_own_are_asked_directly(known: "Directory[Box]"):
    box = Box()
    known.add(STATE, box)
    known.set_timeout(ID, 5, idle_s=None, state_dir=STATE)
    assert known.kill(ID, state_dir=STATE).id == ID
    assert box.calls == [(5, None), "kill"]


@given(TIMES, TIMES, st.dictionaries(st.text(), st.text()), st.none() | st.floats(0, 1e6))
def test_a_status_survives_json(started_at, end_at, labels, idle_s):
    status = SandboxStatus(ID, 7, "paused", "host", "function", labels, started_at, end_at, 5.0, idle_s, 2)
    assert status_of(status.record()) == status


@pytest.mark.parametrize(
    "change", [{"state": "flying"}, {"labels": None}, {"labels": 7}, {"started_at": "soon"}, {"end_at": 5}]
)
def test_what_is_no_status_is_refused(change: dict[str, object]):
    record = replace(SandboxStatus(ID, 7), labels={}).record()
    with pytest.raises(ValueError, match=r"status|state|isoformat"):
        status_of({**record, **change})


def test_times_are_of_no_place():
    assert at(0) == datetime(1970, 1, 1, tzinfo=UTC)
