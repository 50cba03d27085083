"""A hold keeps a sandbox still, whatever is asked of it. The group is a directory that says "frozen"."""

import errno
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from sandbox_places import count_fds

from protocol.clock import SystemClock
from sandbox.errors import CapacityError, SandboxError
from sandbox.pausing import Freezer


@pytest.fixture
def group(tmp_path: Path) -> Path:
    (tmp_path / "cgroup.events").write_text("populated 1\nfrozen 1\n")
    (tmp_path / "cgroup.freeze").write_text("0")
    return tmp_path


def freezer_of(group: Path, ended: Callable[[], object] = lambda: None) -> Freezer:
    return Freezer(group, SystemClock(), lambda: (ended(), None)[1], name="sbx-1")


def is_frozen(group: Path) -> bool:
    return (group / "cgroup.freeze").read_text() == "1"


def test_what_is_asked_meanwhile_waits_for_the_end(group: Path):
    ends: list[int] = []
    freezer = freezer_of(group, lambda: ends.append(1))
    with freezer.held():
        assert freezer.is_paused
        assert freezer.is_held
        freezer.resume()
        assert is_frozen(group)
        assert ends == []
    assert not is_frozen(group)
    assert not freezer.is_paused
    assert ends == [1]


def test_what_was_paused_stays_so(group: Path):
    freezer = freezer_of(group)
    freezer.pause()
    with freezer.held():
        pass
    assert freezer.is_paused
    with freezer.held():
        freezer.resume()
    assert not freezer.is_paused


def test_a_pause_that_is_asked_for_meanwhile_holds_after_it(group: Path):
    freezer = freezer_of(group)
    with freezer.held():
        freezer.resume()
        freezer.pause()
    assert freezer.is_paused


def test_a_sandbox_that_ends_is_not_kept(group: Path):
    freezer = freezer_of(group)
    with freezer.held():
        freezer.release()
        assert not is_frozen(group)
    assert not freezer.is_paused


def test_a_failure_ends_the_hold(group: Path):
    freezer = freezer_of(group)
    with pytest.raises(OSError, match="full"), freezer.held():
        raise OSError("full")
    assert not freezer.is_held
    assert not freezer.is_paused


def test_no_descriptor_is_wanting_for_the_end_of_a_pause(group: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    freezer, before = freezer_of(group), count_fds()
    freezer.pause()
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        freezer.resume()
        assert not is_frozen(group)
        with pytest.raises(CapacityError, match="pausing"):
            freezer.pause()
        with pytest.raises(CapacityError, match="pausing"), freezer.held():
            raise AssertionError("it is not held")
    assert not is_frozen(group)
    assert not freezer.is_held
    freezer.pause()
    assert is_frozen(group)
    freezer.release()
    assert count_fds() == before


def test_what_fails_while_it_stops_lets_it_go_on(group: Path, monkeypatch: pytest.MonkeyPatch):
    (group / "cgroup.events").write_text("populated 1\nfrozen 0\n")
    monkeypatch.setattr("sandbox.pausing._PATIENCE_S", 0.01)
    freezer = freezer_of(group)
    with pytest.raises(SandboxError, match="did not stop"):
        freezer.pause()
    assert not is_frozen(group)
    assert not freezer.is_paused


def test_nobody_waits_for_one_that_stops_and_what_is_asked_of_it_lets_it_go_on(group: Path):
    (group / "cgroup.events").write_text("populated 1\nfrozen 0\n")
    freezer = freezer_of(group)
    pausing = threading.Thread(target=freezer.pause, daemon=True)
    pausing.start()
    while not is_frozen(group):
        assert freezer.paused_ns() == 0
    freezer.resume()
    pausing.join(2)  # not the seconds that a process may take
    assert not pausing.is_alive()
    assert not is_frozen(group)
    assert not freezer.is_paused
    assert freezer.paused_ns() == 0


class Gap:
    """A lock; what comes as soon as it is free again comes once."""

    def __init__(self) -> None:
        self._lock, self.then = threading.Lock(), lambda: None

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        then, self.then = self.then, lambda: None
        then()


def test_a_hold_that_begins_while_it_is_resumed_is_whole(group: Path, monkeypatch: pytest.MonkeyPatch):
    freezer, gap = freezer_of(group), Gap()
    monkeypatch.setattr(freezer, "_lock", gap)
    freezer.pause()
    with ExitStack() as on_end:

        def hold() -> None:
            on_end.enter_context(freezer.held())

        gap.then = hold
        freezer.resume()
        assert freezer.is_held
        assert is_frozen(group)
    assert not is_frozen(group)


def test_a_pause_that_is_asked_for_as_a_hold_ends_is_whole(group: Path, monkeypatch: pytest.MonkeyPatch):
    freezer, gap = freezer_of(group), Gap()
    monkeypatch.setattr(freezer, "_lock", gap)
    with freezer.held():
        gap.then = freezer.pause
    assert freezer.is_paused
    assert is_frozen(group)
