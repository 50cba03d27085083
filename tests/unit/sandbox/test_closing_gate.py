"""A process's end: who still creates, and what one kill that fails does to the others."""

import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from sandbox.closing import Gate
from sandbox.directory import Directory
from sandbox.errors import SandboxGone, StartError

STATE = Path("/state")


@dataclass
class Box:
    """What a directory ends."""

    id: str
    raises: BaseException | None = None
    ended: SandboxGone | None = None
    num_kills: int = 0

    def kill(self) -> None:
        self.num_kills += 1
        if self.raises is not None:
            raise self.raises


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> "Directory[Box]":
    monkeypatch.setattr("sandbox.door.Door.open", lambda self: True)
    return Directory()


def test_nobody_passes_once_it_is_closed():
    gate = Gate()
    with gate.passing():
        gate.close()
        assert not gate.wait(0)
    assert gate.wait(0)
    with pytest.raises(StartError, match="process is ending") as caught, gate.passing():
        pass
    assert caught.value.phase == "exit"


def test_a_childs_is_open():
    gate = Gate()
    with gate.passing():
        gate.close()
        gate.leave()
    assert gate.wait(0)
    with gate.passing():
        assert not gate.wait(0)


@pytest.mark.parametrize("error", [OSError("x"), ValueError("x"), RuntimeError("x")])
def test_whatever_one_kill_raises_the_others_follow(known: "Directory[Box]", error: Exception):
    boxes = [Box("a"), Box("b", raises=error), Box("c")]
    for box in boxes:
        known.add(STATE, box)
    known.end_all()
    assert [box.num_kills for box in boxes] == [1, 1, 1]


def test_an_interrupt_comes_after_the_others(known: "Directory[Box]"):
    boxes = [Box("a", raises=KeyboardInterrupt()), Box("b")]
    for box in boxes:
        known.add(STATE, box)
    with pytest.raises(KeyboardInterrupt):
        known.end_all()
    assert [box.num_kills for box in boxes] == [1, 1]


def test_what_is_being_made_is_waited_for_and_ended(known: "Directory[Box]"):
    inside, first_killed, late = threading.Event(), threading.Event(), Box("late")

    class Told(Box):
        def kill(self) -> None:
            first_killed.set()

    def make() -> None:
        with known.making():
            inside.set()
            assert first_killed.wait(30)  # the end has begun
            known.add(STATE, late)

    known.add(STATE, Told("first"))
    maker = threading.Thread(target=make)
    maker.start()
    assert inside.wait(30)
    known.end_all()
    maker.join()
    assert late.num_kills == 1
    with pytest.raises(StartError), known.making():
        pass
