"""Who looks at folders while others remove them finds what is left."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandbox import cgroups
from sandbox.audit import check_integrity, sweep
from sandbox.layers import image
from sandbox.listings import age_s, list_folder
from sandbox.snapshots import Snapshots

GROUPS = "groups/dockyard"  # of a hierarchy in the place of the kernel's


def test_a_folder_is_listed_by_name_and_pattern(tmp_path: Path):
    for name in ("b", "a", ".draft-1", "draft-2"):
        (tmp_path / name).touch()
    assert [each.name for each in list_folder(tmp_path)] == [".draft-1", "a", "b", "draft-2"]
    assert list_folder(tmp_path, "draft-*") == [tmp_path / "draft-2"]
    assert list_folder(tmp_path / "none") == list_folder(tmp_path / "a") == []


def test_what_has_gone_is_not_old(tmp_path: Path):
    os.utime(tmp_path, (0, time.time() - 60))
    assert 59 < age_s(tmp_path) < 120
    assert age_s(tmp_path / "none") == 0


@pytest.fixture
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With something in each folder that a sweep looks into, none of which has an owner."""
    monkeypatch.setattr(cgroups, "mount_roots", lambda: (tmp_path / "groups",))
    for folder in (
        *(f"{GROUPS}/{cgroups.state_key(tmp_path)}/sbx-1", "images/draft-4194999-x", "layers/sbx-1"),
        *("snapshots/.draft-4194999-x", "snapshots/kept", "apparmor/profile", "sandboxes"),
    ):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("sandboxes/sbx-1.json", "apparmor/profile/sbx-1"):
        (tmp_path / file).touch()
    return tmp_path


def remove_when_listed(doomed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As somebody else would, between what a caller has seen of it and its listing."""

    def late(really: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def look(place: Any) -> Any:
            if place == doomed:
                shutil.rmtree(doomed, ignore_errors=True)
            return really(place)

        return look

    monkeypatch.setattr(os, "listdir", late(os.listdir))
    monkeypatch.setattr(os, "scandir", late(os.scandir))


def abandoned(state_dir: Path) -> None:
    cgroups.remove_abandoned([state_dir / "groups"], time.time())


def snapshots(state_dir: Path) -> None:
    assert Snapshots(state_dir).list() == ()


@pytest.mark.parametrize("look", [check_integrity, sweep, abandoned, snapshots])
@pytest.mark.parametrize(
    "folder",
    [GROUPS, f"{GROUPS}/STATE", "images", "layers", "snapshots", "apparmor", "apparmor/profile", "sandboxes"],
)
def test_what_goes_before_it_is_listed_is_not_there(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch, look: Callable[[Path], object], folder: str
):
    doomed = state_dir / folder.replace("STATE", cgroups.state_key(state_dir))
    remove_when_listed(doomed, monkeypatch)
    look(state_dir)
    if look is sweep:
        assert sweep(state_dir) == ()


def test_templates_that_go_while_they_are_told_by_age_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(image, "_TEMPLATES", 2)
    for number in range(4):
        (tmp_path / f"template-{number}").touch()
        os.utime(tmp_path / f"template-{number}", (0, number))
    really_lstat = Path.lstat

    def lstat_late(path: Path) -> os.stat_result:
        if path.name.startswith("template-"):
            (tmp_path / "template-1").unlink(missing_ok=True)
        return really_lstat(path)

    monkeypatch.setattr(Path, "lstat", lstat_late)
    image._forget_old(tmp_path)  # pyright: ignore[reportPrivateUsage]
    assert [each.name for each in tmp_path.iterdir()] == ["template-3"]  # what has gone counts as the latest
