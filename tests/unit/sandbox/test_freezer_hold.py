"""A hold keeps a sandbox still, whatever is asked of it. The group is a directory that says "frozen"."""

from pathlib import Path

import pytest

from protocol.clock import SystemClock
from sandbox.pausing import Freezer


@pytest.fixture
def group(tmp_path: Path) -> Path:
    (tmp_path / "cgroup.events").write_text("populated 1\nfrozen 1\n")
    return tmp_path


def is_frozen(group: Path) -> bool:
    return (group / "cgroup.freeze").read_text() == "1"


def test_what_is_asked_meanwhile_waits_for_the_end(group: Path):
    ends: list[int] = []
    freezer = Freezer(group, SystemClock(), lambda: ends.append(1))
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
    freezer = Freezer(group, SystemClock(), lambda: None)
    freezer.pause()
    with freezer.held():
        pass
    assert freezer.is_paused
    with freezer.held():
        freezer.resume()
    assert not freezer.is_paused


def test_a_pause_that_is_asked_for_meanwhile_holds_after_it(group: Path):
    freezer = Freezer(group, SystemClock(), lambda: None)
    with freezer.held():
        freezer.resume()
        freezer.pause()
    assert freezer.is_paused


def test_a_sandbox_that_ends_is_not_kept(group: Path):
    freezer = Freezer(group, SystemClock(), lambda: None)
    with freezer.held():
        freezer.release()
        assert not is_frozen(group)
    assert not freezer.is_paused


def test_a_failure_ends_the_hold(group: Path):
    freezer = Freezer(group, SystemClock(), lambda: None)
    with pytest.raises(OSError, match="full"), freezer.held():
        raise OSError("full")
    assert not freezer.is_held
    assert not freezer.is_paused
