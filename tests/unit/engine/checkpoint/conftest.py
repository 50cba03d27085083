from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_deepseek import TINY, random_weights, write_folder
from torch import Tensor

Tampered = Callable[[Callable[[dict[str, Tensor]], None]], Path]


@pytest.fixture
def tampered(tmp_path: Path) -> Tampered:
    """A folder of the tiny model in which something is wrong."""

    def write(change: Callable[[dict[str, Tensor]], None]) -> Path:
        weights = random_weights(TINY)
        change(weights)
        return write_folder(tmp_path / "tampered", TINY, weights)

    return write


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """The tiny model in float32, in three shards."""
    return write_folder(tmp_path / "tiny", TINY, random_weights(TINY), shards=3)
