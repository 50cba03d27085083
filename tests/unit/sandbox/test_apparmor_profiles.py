"""AppArmor's profiles as text, and who uses them. The guest of tests/vm loads them for real."""

import errno
import re
import shutil
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sandbox import Policy
from sandbox.audit import sweep
from sandbox.cgroups import state_key
from sandbox.errors import InvalidArgument, SandboxError
from sandbox.policy import apparmor_profiles
from sandbox.policy.apparmor import profile
from sandbox.policy.apparmor_profiles import LoadedProfiles

PATHS = st.text(
    st.characters(min_codepoint=32, max_codepoint=126, exclude_characters='"\\'), min_size=1, max_size=20
).map(lambda text: "/w" + text)


def test_equal_policies_of_one_scope_share_a_profile():
    assert profile("a", protected=["/x"]) == profile("a", protected=["/x"])
    names = {
        profile("a").name,
        profile("b").name,
        profile("a", protected=["/x"]).name,
        profile("a", hidden=["/x"]).name,
    }
    assert len(names) == 4


def test_places_are_denied_with_what_lies_below():
    text = profile("a", protected=["//w//tests/"], hidden=["/w/a key*"]).text
    for rule in ('"/w/tests" wl,', '"/w/tests/" wl,', '"/w/tests/**" wl,', '"/w/a key\\*/**" rwklx,'):
        assert f"audit deny {rule}" in text


def test_folders_above_places_keep_their_names():
    """And the root's own entries, which a sandbox cannot rename, are as they were."""
    text = profile("a", protected=["/w/a/b/tests"], hidden=["/w/a/key", "/v/x"]).text
    for rule in ('"/w/a/b" wl,', '"/w/a/b/" wl,', '"/w/a" wl,', '"/w/a/" wl,'):
        assert text.count(f"audit deny {rule}") == 1
    for path in ("/w", "/w/", "/v", "/v/", "/"):
        assert f'deny "{path}" ' not in text


@pytest.mark.skipif(shutil.which("apparmor_parser") is None, reason="no apparmor_parser here")
@settings(max_examples=15, deadline=None)
@example(["/w@{NOWHERE}"], ["/w#x", "/w,{a,b}"])
@given(st.lists(PATHS, max_size=2), st.lists(PATHS, max_size=2))
def test_the_parser_takes_any_places(protected: list[str], hidden: list[str]):
    words = ["apparmor_parser", "--skip-kernel-load", "--skip-cache", "--quiet"]
    text = profile("a", protected=protected, hidden=hidden).text
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (text, done.stderr)


@pytest.mark.parametrize(
    "place", ["relative", "/a/../b", "/a/./b", "/.", "/a\nb", "/", "//", '/a"b', "/a\\b"]
)
def test_a_place_that_is_none_is_refused(place: str):
    with pytest.raises(InvalidArgument, match="protected"):
        Policy(protected=(place,))


def test_places_and_no_apparmor_contradict_each_other():
    with pytest.raises(InvalidArgument, match="without"):
        Policy(hidden=("/x",), without=frozenset({"apparmor"}))


class Kernel:
    """The parser and the list of profiles, in the place of a kernel with AppArmor."""

    def __init__(self, listed: Path) -> None:
        self.calls: list[tuple[str, str]] = []
        self.loaded: set[str] = set()
        self._listed = listed
        self.list()

    def list(self) -> None:
        lines = ["/usr/sbin/other (enforce)", *(f"{name} (enforce)" for name in sorted(self.loaded))]
        self._listed.write_text("\n".join(lines) + "\n")

    def parse(self, action: str, text: str) -> None:
        named = re.search(r"profile (\S+)", text)
        assert named is not None
        self.calls.append((action, named[1]))
        if action == "--remove":
            self.loaded.remove(named[1])  # the kernel refuses for one that is not there
        else:
            self.loaded.add(named[1])
        self.list()


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    found = Kernel(tmp_path / "profiles")
    monkeypatch.setattr(apparmor_profiles, "_parser", found.parse)
    monkeypatch.setattr(apparmor_profiles, "_LOADED", tmp_path / "profiles")
    return found


def test_a_profile_is_loaded_with_its_first_user_and_unloaded_with_its_last(tmp_path: Path, kernel: Kernel):
    profiles, one = LoadedProfiles(tmp_path, "a"), profile("a")
    profiles.release("never")
    profiles.acquire(one, "sbx-1")
    profiles.acquire(one, "sbx-2")
    assert kernel.calls == [("--replace", one.name)]
    assert profiles.users() == {one.name: {"sbx-1", "sbx-2"}}
    profiles.release("sbx-1")
    profiles.release("sbx-1")
    assert len(kernel.calls) == 1
    profiles.release("sbx-2")
    assert kernel.calls[1:] == [("--remove", one.name)]
    assert profiles.users() == {}


def test_a_profile_that_has_gone_is_loaded_again(tmp_path: Path, kernel: Kernel):
    """With a restart of the machine, after which the files of those who used it are still there."""
    profiles, one = LoadedProfiles(tmp_path, "a"), profile("a")
    profiles.acquire(one, "sbx-before")
    kernel.loaded.clear()
    kernel.list()
    profiles.acquire(one, "sbx-after")
    assert kernel.loaded == {one.name}
    profiles.release("sbx-before")
    assert kernel.loaded == {one.name}
    profiles.release("sbx-after")
    assert kernel.loaded == set()


def test_users_of_a_profile_that_has_gone_can_be_released(tmp_path: Path, kernel: Kernel):
    profiles, one = LoadedProfiles(tmp_path, "a"), profile("a")
    profiles.acquire(one, "sbx-before")
    kernel.loaded.clear()
    kernel.list()
    profiles.release("sbx-before")
    assert profiles.users() == {}


def test_a_profile_that_was_not_unloaded_is_tried_again(
    tmp_path: Path, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
):
    profiles, one = LoadedProfiles(tmp_path, "a"), profile("a")
    profiles.acquire(one, "sbx-1")

    def hang(action: str, text: str) -> NoReturn:
        raise OSError(errno.ETIMEDOUT, "apparmor_parser has not ended in 60 s")

    with monkeypatch.context() as patch:
        patch.setattr(apparmor_profiles, "_parser", hang)
        with pytest.raises(TimeoutError):
            profiles.release("sbx-1")
    assert profiles.users() == {one.name: {"sbx-1"}}
    profiles.release("sbx-1")
    assert kernel.loaded == set()
    assert profiles.users() == {}


def test_what_a_user_names_in_his_state_directory_is_not_unloaded(tmp_path: Path, kernel: Kernel):
    """By root's sweep of it, which would also have emptied whatever file the lock is a link to."""
    kernel.loaded.add("docker-default")
    kernel.list()
    planted, file = tmp_path / "apparmor" / "docker-default" / "sbx-1", tmp_path / "file"
    planted.parent.mkdir(parents=True)
    planted.touch()
    file.write_text("words")
    profiles = LoadedProfiles(tmp_path, "a")
    assert profiles.users() == {}
    profiles.release("sbx-1")
    (tmp_path / "apparmor" / "lock").unlink()
    (tmp_path / "apparmor" / "lock").symlink_to(file)
    with pytest.raises(OSError, match="symbolic links"):
        profiles.release("sbx-1")
    own = tmp_path / "apparmor" / profile(state_key(tmp_path)).name / "sbx-2"
    own.parent.mkdir()
    own.touch()
    (tmp_path / "layers" / "sbx-3").mkdir(parents=True)
    with pytest.raises(SandboxError, match="unloading a profile"):
        sweep(tmp_path)
    assert not (tmp_path / "layers" / "sbx-3").exists(), "it goes on behind it"
    assert (kernel.calls, file.read_text()) == ([], "words")
