"""A write that fails, in whatever way, leaves nothing that its folder's bound does not count."""

from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from engine.cache.disk_tier import DiskTier


@pytest.mark.parametrize(
    "place", ["os.utime", "pathlib.Path.replace", "engine.cache.folder_index.FolderIndex.add"]
)
@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt(), ZeroDivisionError()])
def test_a_write_that_ends_in_whatever_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, error: BaseException
) -> None:
    """Its part was outside the folder's bound, for an hour."""

    def fail(*arguments: object, **named: object) -> NoReturn:
        raise error

    tier = DiskTier(tmp_path, 1 << 20, 3600.0)
    with monkeypatch.context() as patch:
        patch.setattr(place, fail)
        with pytest.raises(type(error)):
            tier.put("block", b"k" * 16, b"t" * 16, np.arange(40, dtype=np.uint8))
    assert not list(tmp_path.glob("??/*"))
    tier.check_integrity()
    assert tier.put("block", b"k" * 16, b"t" * 16, np.arange(40, dtype=np.uint8))
