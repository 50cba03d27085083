"""There is one default home: what set-up fills is where a sandbox that is told nothing looks. Another user's
is refused in one way, whatever is asked of it."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import cli.root
import cli.sandboxes
from cli.main import run
from cluster.config import load_config
from cluster.state import StateFolder
from protocol.errors import InvalidInput
from sandbox import Sandbox, sandboxes
from sandbox.audit import check_integrity, leftovers, sweep
from sandbox.audit_log import entries
from sandbox.errors import AuthError
from sandbox.places import default_home, default_state_dir, default_toolkit
from sandbox.snapshots import Snapshots

LOADED = (cli.root, cli.sandboxes)  # while it is root who reads them: nobody may not, everywhere
NOBODY, NOT_ONE = 65534, "sbx-000000000000000"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


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


@pytest.fixture(params=["", "sandbox", "sandbox/sandboxes"])
def home_of_another(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Root's, where one folder is closed to others; for who is nobody meanwhile."""
    home = Path(tempfile.mkdtemp(prefix="dockyard-test-"))
    home.chmod(0o755)
    (home / "sandbox" / "sandboxes").mkdir(parents=True)
    (home / request.param).chmod(0o700)
    os.seteuid(NOBODY)
    try:
        yield home
    finally:
        os.seteuid(0)
        shutil.rmtree(home)


WAYS: dict[str, Callable[[Path], object]] = {
    "create": lambda state: Sandbox.create(state_dir=state),
    "list": lambda state: Sandbox.list(state_dir=state),
    "info": lambda state: sandboxes.info(NOT_ONE, state_dir=state),
    "attach": lambda state: sandboxes.attach(NOT_ONE, state_dir=state),
    "check_integrity": check_integrity,
    "sweep": sweep,
    "snapshots": lambda state: Snapshots(state).list(),
    "log": lambda state: list(entries(state)),
}


@needs_root
@pytest.mark.parametrize("way", WAYS)
def test_a_state_directory_of_another_users_is_not_ours(way: str, home_of_another: Path) -> None:
    with pytest.raises(AuthError, match="is another user's"):
        WAYS[way](home_of_another / "sandbox")


@needs_root
@pytest.mark.parametrize("verb", ["list", "log", "sweep", "snapshots"])
def test_nor_is_it_on_the_command_line(
    verb: str, home_of_another: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DOCKYARD_HOME", str(home_of_another))
    assert run(["sandbox", verb, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "not_yours"
