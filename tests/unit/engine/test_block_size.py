"""Blocks fit the model's ratios by themselves, and what a caller wrote stays or is refused."""

from pathlib import Path

import pytest
from engine_runs import small_engine

from engine.cache.block_size import block_size
from engine.errors import InvalidRequest


@pytest.mark.parametrize(
    ("ratios", "expected"), [((), 16), ((1,), 16), ((2, 1), 16), ((4, 8), 16), ((4, 128), 128), ((3,), 48)]
)
def test_unwritten_it_is_the_least_multiple_that_fits(ratios: tuple[int, ...], expected: int) -> None:
    assert block_size(None, ratios) == expected


def test_what_is_written_stays_or_is_refused_with_what_would_fit() -> None:
    assert block_size(8, (4, 8)) == 8
    with pytest.raises(InvalidRequest, match=r"block_tokens is 16, .*\[4, 128\]") as refused:
        block_size(16, (4, 128))
    assert (refused.value.parameter, "128" in refused.value.hint) == ("block_tokens", True)


def test_an_engine_of_a_file_has_blocks_of_16(tiny_model: Path) -> None:
    engine = small_engine(tiny_model)
    assert engine.pool.block_tokens == 16
    engine.close()
