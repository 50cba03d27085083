"""There is one default home: what set-up fills is where a sandbox that is told nothing looks."""

from pathlib import Path

import pytest

from cluster.config import load_config
from cluster.state import StateFolder
from protocol.errors import InvalidInput
from sandbox.audit import check_integrity, leftovers, sweep
from sandbox.audit_log import entries
from sandbox.places import default_home, default_state_dir, default_toolkit


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "user/.local/state/dockyard"),
        ({"XDG_STATE_HOME": "xdg"}, "xdg/dockyard"),
        ({"XDG_STATE_HOME": "xdg", "DOCKYARD_HOME": "mine"}, "mine"),
        ({"XDG_STATE_HOME": "", "DOCKYARD_HOME": ""}, "user/.local/state/dockyard"),
    ],
)
def test_sandboxes_and_the_command_line_mean_the_same_places(
    environment: dict[str, str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    for name in ("XDG_STATE_HOME", "DOCKYARD_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    state = StateFolder(load_config().state_dir)
    assert default_home() == state.root == tmp_path / expected
    assert default_state_dir() == state.sandboxes
    assert default_toolkit(default_state_dir()) == state.toolkit


def test_where_there_is_no_home_both_say_what_to_set(monkeypatch: pytest.MonkeyPatch):
    """As for a uid that no file of users has."""
    for name in ("HOME", "XDG_STATE_HOME", "DOCKYARD_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", dict[int, object]().__getitem__)
    for ask in (default_home, load_config):
        with pytest.raises(InvalidInput, match="no home directory") as caught:
            ask()
        assert "DOCKYARD_HOME" in caught.value.hint


def test_a_state_directory_may_be_a_text(tmp_path: Path) -> None:
    assert check_integrity(str(tmp_path)) == check_integrity(tmp_path)
    assert leftovers(str(tmp_path)) == sweep(str(tmp_path)) == ()
    assert list(entries(str(tmp_path))) == []
