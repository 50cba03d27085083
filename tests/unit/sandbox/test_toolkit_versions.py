"""There is always one whole toolkit, and older versions go when nobody can have them any more.

What a version holds does not matter here, so it is filled with one file; the real one is made by set-up.
"""

import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox import toolkit
from sandbox.audit import leftovers, sweep
from sandbox.errors import InvalidArgument, StartError
from sandbox.journal import Journal, Record
from sandbox.places import SUPERSEDED_S, default_toolkit
from sandbox.processes import boot_id, this_process

Build = Callable[[str], bool]


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    return tmp_path / "sandbox"


@pytest.fixture
def place(state_dir: Path) -> Path:
    return default_toolkit(state_dir)


@pytest.fixture
def build(place: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    """Makes the toolkit of an interpreter and packages that a word stands for."""

    def build_one(word: str) -> bool:
        def fill(root: Path, interpreter: Path) -> None:
            (root / "python").write_text(word)

        monkeypatch.setattr(toolkit, "_fill", fill)
        monkeypatch.setattr(toolkit, "_stamp", lambda _: hashlib.sha256(word.encode()).hexdigest())
        return toolkit.build_toolkit(place)

    return build_one


def age(path: Path) -> None:
    long_ago = time.time() - 2 * SUPERSEDED_S
    os.utime(path, (long_ago, long_ago), follow_symlinks=False)


def drafts(place: Path) -> list[Path]:
    return list(place.parent.glob(".toolkit-*"))


def test_a_version_is_made_once_and_again_when_something_changes(build: Build, place: Path):
    assert [build("a"), build("a"), build("b"), build("a"), build("a")] == [True, False, True, True, False]
    assert (place / "python").read_text() == "a"
    assert len(list(place.parent.iterdir())) == 3  # the link and two versions, no draft


def test_whoever_has_the_old_version_keeps_it(build: Build, place: Path):
    build("a")
    mounted = place.resolve()
    build("b")
    assert (mounted / "python").read_text() == "a"
    assert (place / "python").read_text() == "b"


def test_there_is_never_a_moment_without_one(build: Build, place: Path):
    build("a")
    gaps, ended = list[str](), threading.Event()

    def watch() -> None:
        while not ended.is_set():
            try:
                (place / "python").read_text()
            except OSError as error:
                gaps.append(str(error))

    watcher = threading.Thread(target=watch)
    watcher.start()
    for index in range(200):
        build(str(index))
    ended.set()
    watcher.join()
    assert gaps == []


def test_a_replacement_that_is_cut_short_leaves_the_old_one(
    build: Build, place: Path, monkeypatch: pytest.MonkeyPatch
):
    build("a")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            build("b")
    assert (place / "python").read_text() == "a"
    assert drafts(place) == []
    assert build("b")
    assert (place / "python").read_text() == "b"


def test_a_plain_copy_in_its_place_is_replaced(build: Build, place: Path):
    place.mkdir(parents=True)
    (place / "python").write_text("plain")
    (place / "VERSION").write_text(hashlib.sha256(b"plain").hexdigest())
    assert build("a")
    assert (place / "python").read_text() == "a"
    assert place.is_symlink()
    assert drafts(place) == []


def test_what_is_no_toolkit_stays_whole(build: Build, place: Path):
    folder = place.with_name("elsewhere")
    folder.mkdir(parents=True)
    (folder / "thesis").write_text("all of it")
    (folder / "VERSION").write_text("3")
    place.symlink_to("elsewhere")
    with pytest.raises(InvalidArgument, match="no toolkit"):
        build("a")
    place.unlink()
    folder.rename(place)
    with pytest.raises(InvalidArgument, match="no toolkit"):
        build("a")
    assert (place / "thesis").read_text() == "all of it"
    place.rename(folder)
    place.write_text("a file")
    with pytest.raises(InvalidArgument, match="no toolkit"):
        build("a")
    assert place.read_text() == "a file"


def test_a_place_that_cannot_be_made_is_said(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match="making the toolkit"):
        toolkit.build_toolkit(tmp_path / "file" / "toolkit")


def test_what_is_in_the_way_is_named_and_left_alone(build: Build, place: Path):
    build("a")
    place.resolve().joinpath("VERSION").unlink()
    with pytest.raises(StartError, match="in the way"):
        build("a")
    assert (place / "python").read_text() == "a"


def test_old_versions_go_a_day_later_when_no_sandbox_lives(build: Build, place: Path, state_dir: Path):
    build("a")
    old = place.resolve()
    build("b")
    assert leftovers(state_dir) == ()
    age(place)
    record = Record("sbx-live", this_process(), boot_id(), "function", cgroups=())
    Journal(state_dir).write(record)
    assert leftovers(state_dir) == ()
    Journal(state_dir).remove(record.id)
    assert [each.name for each in sweep(state_dir)] == [str(old)]
    assert not old.exists()
    assert (place / "python").read_text() == "b"
    assert sweep(state_dir) == ()


def test_folders_of_others_beside_it_are_no_versions(build: Build, place: Path, state_dir: Path):
    build("a")
    for name in ("toolkit-notes", "toolkit-0123456789abcdef"):
        (place.parent / name).mkdir()
        (place.parent / name / "VERSION").write_text("1.0")
    age(place)
    assert sweep(state_dir) == ()


def test_an_old_version_that_another_sweep_removes_right_then_is_none(
    build: Build, place: Path, monkeypatch: pytest.MonkeyPatch
):
    build("a")
    build("b")
    age(place)
    assert len(toolkit.superseded(place, {os.geteuid()})) == 1
    really_read = Path.read_text

    def read_late(path: Path) -> str:
        shutil.rmtree(path.parent)
        return really_read(path)

    monkeypatch.setattr(Path, "read_text", read_late)
    assert toolkit.superseded(place, {os.geteuid()}) == []


def test_the_command_needs_no_home_where_it_is_told_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """As for a uid that no file of users has; otherwise it says what to set."""
    for name in ("HOME", "XDG_STATE_HOME", "DOCKYARD_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", dict[int, object]().__getitem__)
    monkeypatch.setattr("sandbox.toolkit.build_toolkit", lambda into: False)
    monkeypatch.setattr("sys.argv", ["toolkit", "--into", str(tmp_path)])
    toolkit.main()
    assert capsys.readouterr().out == f"{tmp_path}: up to date\n"
    monkeypatch.setattr("sys.argv", ["toolkit"])
    with pytest.raises(SystemExit):
        toolkit.main()
    assert "no home directory" in capsys.readouterr().err


@pytest.mark.parametrize("name", [".toolkit-x", f".toolkit-{'x' * 240}", "toolkit-a", "toolkit-b"])
@pytest.mark.skipif(os.geteuid() != 0, reason="another user's files are needed")
def test_what_another_user_has_put_beside_a_state_directory_is_his(
    build: Build, state_dir: Path, place: Path, name: str
):
    """A link had whatever it leads to closed to everybody but root, and a folder went."""
    build("a")
    age(place)
    state_dir.mkdir()
    place.parent.chmod(0o1777)
    outside, planted = place.with_name("outside"), place.with_name(name)
    outside.mkdir()
    mode = outside.stat().st_mode
    if name == "toolkit-b":
        planted.mkdir(0o700)
        (planted / "VERSION").write_bytes(b"\xff")  # no text
    else:
        planted.symlink_to(outside)
    os.chown(planted, 65531, 65531, follow_symlinks=False)
    assert sweep(state_dir) == ()
    assert os.path.lexists(planted)
    assert outside.stat().st_mode == mode


@pytest.mark.parametrize("folder", ["layers", "images", "snapshots"])
@pytest.mark.skipif(os.geteuid() != 0, reason="another user's state directory is needed")
def test_roots_sweep_of_a_users_state_follows_no_link_of_his(state_dir: Path, tmp_path: Path, folder: str):
    outside = tmp_path / "outside"
    names = {"layers": "sbx-1", "images": "draft-x", "snapshots": ".draft-x"}
    (outside / names[folder]).mkdir(parents=True)
    (outside / names[folder] / "file").touch()
    state_dir.mkdir()
    (state_dir / folder).symlink_to(outside)
    os.chown(state_dir, 65531, 65531)
    os.chown(state_dir / folder, 65531, 65531, follow_symlinks=False)
    assert sweep(state_dir) == ()
    assert (outside / names[folder] / "file").exists()


def test_a_version_that_is_no_text_is_none(build: Build, place: Path):
    build("a")
    age(place)
    other = place.with_name("toolkit-other")
    other.mkdir()
    (other / "VERSION").write_bytes(b"\xff")
    assert toolkit.superseded(place, {os.geteuid()}) == []
