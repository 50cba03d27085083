"""What an attached sandbox does not have is said, with where it is to be had."""

import copy
from pathlib import Path

import pytest
from sandbox_owner import owned

from sandbox import sandboxes
from sandbox.errors import UnsupportedError


def test_what_only_its_owner_has_is_unsupported_and_not_there(tmp_path: Path, toolkit: Path):
    with owned(tmp_path, toolkit) as owner:
        box = sandboxes.attach(owner.id, state_dir=tmp_path)
        assert [each.name for each in box.files.list("/")]  # a directory too
        for part, name in ((box, "sessions"), (box.commands, "start"), (box.files, "upload_dir")):
            assert not hasattr(part, name)
            with pytest.raises(UnsupportedError, match=f"{type(part).__name__} has no '{name}'") as caught:
                getattr(part, name)
            assert "owner's process" in caught.value.hint
            assert copy.copy(part).__dict__ == part.__dict__
