"""Folders that others walk through, or must not write to, whatever the umask of who makes them."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox import cgroups
from sandbox.privileged import groups
from sandbox.root_ranges import RootRanges


@pytest.fixture(params=[0o000, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode_of(place: Path) -> int:
    return place.stat().st_mode & 0o7777


@pytest.mark.usefixtures("umask")
def test_where_helpers_listen_is_open_to_their_users(tmp_path: Path):
    RootRanges(tmp_path / "run" / "ids").close()
    assert mode_of(tmp_path / "run") == 0o755


def test_what_is_there_already_keeps_its_mode(tmp_path: Path):
    (tmp_path / "run").mkdir(mode=0o700)
    RootRanges(tmp_path / "run" / "ids").close()
    assert mode_of(tmp_path / "run") == 0o700


@pytest.mark.usefixtures("umask")
def test_the_top_of_our_groups_is_open_to_those_with_a_folder_there(tmp_path: Path):
    cgroups._make_above(tmp_path / "dockyard" / "state")
    cgroups._make_above(tmp_path / "dockyard" / "other")
    found = [mode_of(tmp_path / "dockyard" / each) for each in (".", "state", "other")]
    assert found == [0o755, 0o755, 0o755]


@pytest.mark.usefixtures("umask")
def test_a_helper_opens_what_root_has_made_before(tmp_path: Path):
    top = tmp_path / "dockyard"
    top.mkdir(mode=0o700)
    groups.hand_over(top / "state", os.getuid(), os.getgid())
    assert mode_of(top) == 0o755
