"""Who gets a helper, and what root is willing to run as one."""

import multiprocessing
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from sandbox import helper_start
from sandbox.errors import InvalidArgument, UnsupportedError
from sandbox.helper_start import Bounds, find_uid, helper_words
from sandbox.places import helper_socket
from sandbox.privileged import trust
from sandbox.privileged.trust import first_foreign, first_foreign_below


def test_a_user_is_a_name_or_a_number():
    assert find_uid("nobody") == find_uid("65534") == 65534


@pytest.mark.parametrize("user", ["no such user", "", "root", "0", "4294967295"])
def test_who_is_no_ordinary_user_gets_none(user: str):
    with pytest.raises(InvalidArgument, match="user="):
        find_uid(user)


def test_an_ordinary_user_cannot_start_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(helper_start.os, "geteuid", lambda: 1000)
    with pytest.raises(UnsupportedError, match="needs root"):
        helper_start.run_helper("nobody")


@pytest.mark.skipif(os.geteuid() != 0, reason="files of root's are needed")
def test_what_others_could_change_is_not_run(tmp_path: Path):
    own = tmp_path / "own"
    own.mkdir(mode=0o755)
    program = own / "program.py"
    program.write_text("")
    program.chmod(0o644)
    assert first_foreign([program]) is None
    program.chmod(0o664)
    assert first_foreign([program]) == program
    program.chmod(0o644)
    os.chown(own, 65534, 65534)
    assert first_foreign([program]) == own
    os.chown(own, 0, 0)
    link = tmp_path / "link"
    link.symlink_to(program)
    assert first_foreign([link]) is None
    own.chmod(0o1777)  # as /tmp: others may put files there, and not in the place of this one
    assert first_foreign([program]) is None
    assert first_foreign([own / "absent.py"]) == own / "absent.py"
    own.chmod(0o755)
    assert first_foreign([own / "absent.py"]) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="files of root's are needed")
def test_links_are_looked_at_and_not_only_where_they_lead_to(tmp_path: Path):
    program = tmp_path / "program.py"
    program.touch(mode=0o644)
    theirs, own = tmp_path / "theirs", tmp_path / "own"
    theirs.mkdir(mode=0o755)
    own.mkdir(mode=0o755)
    os.chown(theirs, 65534, 65534)
    (theirs / "link").symlink_to(program)
    assert first_foreign([theirs / "link"]) == theirs
    (own / "link").symlink_to("../theirs/link")  # a way that goes by what another could change
    assert first_foreign([own / "link"]) == theirs
    (own / "here").symlink_to("../own")
    assert first_foreign([own / "here" / ".." / "program.py"]) is None
    (own / "round").symlink_to("round")
    first_foreign([own / "round"])


@pytest.mark.skipif(os.geteuid() != 0, reason="files of root's are needed")
def test_all_that_can_be_imported_is_looked_at(tmp_path: Path):
    library = tmp_path / "library"
    for folder in (library / "inner" / "__pycache__", library / "site-packages"):
        folder.mkdir(parents=True)
    assert first_foreign_below(library) is None
    (library / "site-packages" / "x.pth").touch()
    os.chown(library / "site-packages" / "x.pth", 65534, 65534)  # which -S leaves out
    assert first_foreign_below(library) is None
    compiled = library / "inner" / "__pycache__" / "module.pyc"
    compiled.touch()
    os.chown(compiled, 65534, 65534)
    assert first_foreign_below(library) == compiled


def test_its_interpreter_takes_nothing_from_its_surroundings():
    words = helper_words("7", Path("/run/x.sock"))
    assert words[1:3] == ["-I", "-S"]
    assert not Path(words[0]).is_symlink()
    assert words[4:] == ["7", "socket=/run/x.sock"]
    bounded = helper_words("7", None, Bounds(memory_mb=64, pids=20, cpu=1.5))
    assert bounded[4:] == ["7", f"memory={64 << 20}", "pids=20", "cpu=150000"]
    if os.geteuid() == 0:  # for others it is refused, as they could change what root would run
        assert f"ExecStart={' '.join(words[:4])} %i\n" in helper_start.unit()


def test_a_module_that_answers_for_any_name_is_no_file(monkeypatch: pytest.MonkeyPatch):
    class Answering(ModuleType):
        def __getattr__(self, name: str) -> object:
            return object()

    monkeypatch.setitem(sys.modules, "answering", Answering("answering"))
    assert all(isinstance(path, Path) for path in helper_start._surroundings())


def test_memory_that_is_shared_and_not_run_is_no_matter():
    """A semaphore of multiprocessing's, in a folder where all may write."""
    lock = multiprocessing.get_context("spawn").Lock()
    mapped = Path("/proc/self/maps").read_text()
    assert "/dev/shm/" in mapped
    assert not any(path.is_relative_to("/dev/shm") for path in trust.running())
    del lock


@pytest.mark.parametrize("name", ["memory_mb", "pids", "cpu"])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_bound_that_bounds_nothing_is_refused(name: str, value: float):
    with pytest.raises(InvalidArgument, match=name):
        Bounds(**{name: value}).words()  # pyright: ignore[reportArgumentType]


def test_a_place_where_no_socket_can_be_made_is_refused_before_it_starts(tmp_path: Path):
    helper_start.check_place(None)
    helper_start.check_place(tmp_path / "helper.sock")
    for place in (tmp_path / "no" / "s", tmp_path, tmp_path / ("n" * 108)):
        with pytest.raises(InvalidArgument, match=f"--socket {place}: "):
            helper_start.check_place(place)


def test_a_user_looks_where_it_listens(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("DOCKYARD_HELPER", raising=False)
    assert helper_socket(7) == Path("/run/dockyard/helper-7.sock")
    assert helper_socket() == Path(f"/run/dockyard/helper-{os.geteuid()}.sock")
    monkeypatch.setenv("DOCKYARD_HELPER", "/elsewhere")
    assert helper_socket() == Path("/elsewhere")
    assert helper_socket(7) == Path("/run/dockyard/helper-7.sock")
