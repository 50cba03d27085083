"""One skeleton a key; those of keys that hold no more go when nobody can have them any more."""

import os
import tempfile
import time
from pathlib import Path

import pytest
from sandbox_places import no_descriptor_left

from sandbox import audit
from sandbox.audit import leftovers, sweep
from sandbox.images import prepare_image
from sandbox.journal import Journal, Record
from sandbox.places import SUPERSEDED_S
from sandbox.processes import boot_id, this_process


@pytest.fixture
def init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the static program, of which a skeleton only holds a copy."""
    path = tmp_path / "dockyard-init"
    path.write_text("1")
    monkeypatch.setattr(audit, "INIT_BINARY", path)
    return path


@pytest.fixture
def toolkit(tmp_path: Path) -> Path:
    (tmp_path / "toolkit" / "bin").mkdir(parents=True)
    (tmp_path / "toolkit" / "bin" / "python3").touch()
    return tmp_path / "toolkit"


def test_skeletons_of_old_keys_are_swept_a_day_later(init: Path, toolkit: Path, tmp_path: Path):
    state = tmp_path / "state"
    old = prepare_image("host", state_dir=state, init=init, toolkit=toolkit).skeleton
    init.write_text("another")
    new = prepare_image("host", state_dir=state, init=init, toolkit=toolkit).skeleton
    assert old != new
    assert leftovers(state) == ()

    os.utime(new, (0, time.time() - 2 * SUPERSEDED_S))
    record = Record("sbx-live", this_process(), boot_id(), "function", cgroups=())
    Journal(state).write(record)
    assert leftovers(state) == ()  # it may be the old one's

    Journal(state).remove(record.id)
    assert [each.name for each in sweep(state)] == [str(old)]
    assert [path.name for path in (state / "images").iterdir()] == [new.name]
    assert sweep(state) == ()


def test_a_draft_that_no_descriptor_was_free_to_remove_goes_before_the_next(
    init: Path, toolkit: Path, tmp_path: Path
):
    state = tmp_path / "state"
    with no_descriptor_left(), pytest.raises(OSError, match="Too many open files"):
        prepare_image("host", state_dir=state, init=init, toolkit=toolkit)
    assert [path.name[:6] for path in (state / "images").iterdir()] == ["draft-"]
    skeleton = prepare_image("host", state_dir=state, init=init, toolkit=toolkit).skeleton
    assert [*(state / "images").iterdir()] == [skeleton]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_an_ordinary_users_read_only_draft_is_swept_too():
    with tempfile.TemporaryDirectory() as place:  # which anybody can reach, unlike those of pytest
        draft = Path(place, "images", "draft-4194999-x")
        (draft / "etc").mkdir(parents=True)
        (draft / "etc" / "hosts").touch()
        for path in (draft / "etc" / "hosts", draft / "etc", draft, draft.parent, Path(place)):
            path.chmod(0o755 if path in draft.parents else 0o555)
            os.chown(path, 65534, -1)
        os.seteuid(65534)
        try:
            assert [each.kind for each in sweep(Path(place))] == ["directory"]
            assert sweep(Path(place)) == ()
        finally:
            os.seteuid(0)
        assert not draft.exists()
