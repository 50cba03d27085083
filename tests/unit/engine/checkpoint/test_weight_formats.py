"""FP8 in blocks and FP4 in groups: nearest values, exact round trips, scales as raw bytes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.checkpoint.formats import StoredWeight, dequantise, quantise, raw_bytes
from protocol.errors import InvalidInput

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
blocks = st.tuples(st.sampled_from([1, 2, 32, 128]), st.sampled_from([4, 32, 128]))


def stored(values: Tensor, dtype: str, block: tuple[int, int]) -> StoredWeight:
    tensors = quantise(values, dtype, block)
    return StoredWeight(dtype, tensors[0], tensors[1] if len(tensors) > 1 else None, block)


def some(rows: int, columns: int, seed: int, spread: float = 3.0) -> Tensor:
    """Values whose sizes differ by many powers of two, as those of weights do between rows."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randn(rows, 1, generator=generator) * spread)
    return torch.randn(rows, columns, generator=generator) * sizes


@settings(deadline=None)
@given(rows=st.integers(1, 70), columns=st.integers(1, 70), block=blocks, seed=st.integers(0, 99))
def test_fp8_blocks_may_be_cut_by_the_edge(
    rows: int, columns: int, block: tuple[int, int], seed: int
) -> None:
    """Within 1/16 of each value, or of the least normal one at its block's scale."""
    values = some(rows, columns, seed, spread=0.5)
    weight = stored(values, "F8_E4M3", block)
    assert weight.scales is not None
    assert weight.scales.shape == (-(-rows // block[0]), -(-columns // block[1]))
    error = (dequantise(weight) - values).abs()
    assert (error <= values.abs() / 16 + values.abs().max() / 448 * 2 * 2**-10).all()


@settings(deadline=None)
@given(rows=st.integers(1, 8), groups=st.integers(1, 4), seed=st.integers(0, 999))
def test_fp4_takes_the_nearest_value(rows: int, groups: int, seed: int) -> None:
    values = some(rows, groups * 32, seed)
    weight = stored(values, "I8", (1, 32))
    assert weight.scales is not None
    scales = torch.exp2(raw_bytes(weight.scales).double() - 127).repeat_interleave(32, 1)
    nearest = (values.double() / scales).abs()[..., None].sub(E2M1.double()).abs().amin(-1)
    found = (dequantise(weight).double() / scales - values.double() / scales).abs()
    torch.testing.assert_close(found, nearest, rtol=0, atol=1e-9)
    assert (values.double() / scales).abs().max() <= 6 * (1 + 1e-6)


@settings(deadline=None)
@given(
    dtype_block=st.sampled_from([("I8", (1, 32)), ("F8_E4M3", (32, 32)), ("F8_E4M3", (1, 32))]),
    seed=st.integers(0, 999),
)
def test_stored_values_come_back_from_float32_and_bfloat16(
    dtype_block: tuple[str, tuple[int, int]], seed: int
) -> None:
    """The scale may shrink where a block's largest value allows; no value changes."""
    dtype, block = dtype_block
    values = dequantise(stored(some(40, 64, seed), dtype, block))
    assert torch.equal(dequantise(stored(values, dtype, block)), values)
    assert torch.equal(values.bfloat16().float(), values)


@pytest.mark.parametrize("dtype", ["I8", "F8_E4M3"])
def test_every_code_and_scale_is_read_as_the_format_says(dtype: str) -> None:
    """All bytes against the formats' definitions, at three scales."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256)
    scales = torch.tensor([[120], [127], [140]], dtype=torch.uint8).expand(
        3, 512 // 32 if dtype == "I8" else 8
    )
    values = codes.expand(3, 256).contiguous().view(torch.int8 if dtype == "I8" else torch.float8_e4m3fn)
    weight = StoredWeight(dtype, values, scales.contiguous().view(torch.float8_e8m0fnu), (1, 32))
    expected = [fp4(code) for byte in range(256) for code in (byte & 15, byte >> 4)] if dtype == "I8" else [
        e4m3(byte) for byte in range(256)
    ]  # fmt: skip
    for row, exponent in zip(dequantise(weight), (-7, 0, 13), strict=True):
        torch.testing.assert_close(
            row, torch.tensor(expected) * 2.0**exponent, rtol=0, atol=0, equal_nan=True
        )


def fp4(code: int) -> float:
    return (-1.0 if code & 8 else 1.0) * float(E2M1[code & 7])


def e4m3(byte: int) -> float:
    sign, exponent, mantissa = -1.0 if byte & 128 else 1.0, (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def test_float32_scales_of_base_models_are_numbers() -> None:
    values = torch.ones(2, 4).to(torch.float8_e4m3fn)
    scales = torch.tensor([[0.75, 3.0]])
    out = dequantise(StoredWeight("F8_E4M3", values, scales, (2, 2)))
    assert out.tolist() == [[0.75, 0.75, 3, 3]] * 2


def test_zeros_stay_zeros() -> None:
    for dtype in ("I8", "F8_E4M3"):
        assert not dequantise(
            stored(torch.zeros(32, 32), dtype, (32, 32) if dtype != "I8" else (1, 32))
        ).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_no_numbers_are_refused(bad: float) -> None:
    with pytest.raises(InvalidInput, match="not a number"):
        quantise(torch.tensor([[bad]]), "BF16", (1, 1))


def test_rows_that_do_not_fill_groups_are_refused() -> None:
    with pytest.raises(InvalidInput, match="groups of 32"):
        quantise(torch.ones(2, 33), "I8", (1, 32))


def test_what_is_read_has_memory_of_its_own() -> None:
    values = torch.ones(2, 2)
    dequantise(StoredWeight("F32", values)).add_(1)
    assert values.sum() == 4
