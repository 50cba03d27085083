"""What a sandbox has is given back, whatever becomes of one thing."""

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from cut_short import files_end_at

from sandbox.errors import CapacityError
from sandbox.journal import Journal
from sandbox.limits import Asked, settle
from sandbox.ownership import Ownership
from sandbox.processes import NOBODY, this_process


@pytest.fixture
def owned(tmp_path: Path) -> Ownership:
    """Of a sandbox without groups."""
    one = Ownership(
        "sbx-1", state_dir=tmp_path, substrate="function", groups=(), all_hierarchies=False
    )  # fmt: skip
    one.create(settle(Asked(), frozenset()))
    return one


def failing(error: Exception) -> Callable[[], NoReturn]:
    def fail() -> NoReturn:
        raise error

    return fail


@pytest.mark.parametrize("error", [CapacityError("in use"), OSError("no"), MemoryError(), LookupError()])
def test_the_rest_is_given_back_and_the_entry_is_nobodys(
    owned: Ownership, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    given_back: list[str] = []
    monkeypatch.setattr(owned.groups, "remove", failing(error))
    monkeypatch.setattr(owned, "_remove_layer", lambda: given_back.append("layer"))
    with pytest.raises(type(error)) as caught:
        owned.release(None)
    assert (caught.value, given_back) == (error, ["layer"])
    assert [record.owner for record in Journal(tmp_path).records()] == [NOBODY]


def test_a_full_disk_hides_no_error(owned: Ownership, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(owned.groups, "remove", failing(CapacityError("in use")))
    with files_end_at(10), pytest.raises(CapacityError, match="in use"):
        owned.release(None)
    assert [record.owner for record in Journal(tmp_path).records()] == [this_process()]
    with pytest.raises(CapacityError, match="in use"):
        owned.release(None)
    assert [record.owner for record in Journal(tmp_path).records()] == [NOBODY]
