"""Matrices as whole numbers: what FP4 and FP8 hold stays, and nothing is further off than is said."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.checkpoint.formats import StoredWeight, dequantise, quantise
from kernels.torch_operations import dequantize
from kernels.whole_numbers import E2M1, whole_numbers


def values_of(seed: int, rows: int = 40, columns: int = 96, spread: float = 1.0) -> Tensor:
    """Normal, blocks apart by powers of two."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns // 32, 32, generator=generator)
    return (x * (spread * torch.randn(rows, columns // 32, 1, generator=generator)).exp2()).flatten(1)


def released(values: Tensor, dtype: str, block: tuple[int, int]) -> Tensor:
    stored, scales = quantise(values, dtype, block)
    return dequantise(StoredWeight(dtype, stored, scales, block))


def largest_powers(values: Tensor) -> Tensor:
    """Of each value's block: the largest power of two that its largest value reaches."""
    largest = values.view(len(values), -1, 32).abs().amax(-1, keepdim=True)
    return largest.log2().floor().exp2().expand(-1, -1, 32).flatten(1)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), spread=st.sampled_from([0.0, 1.0, 12.0]))
def test_released_experts_stay_as_they_are(seed: int, spread: float) -> None:
    values = released(values_of(seed, spread=spread), "I8", (1, 32))
    weight = whole_numbers(values)
    assert weight is not None
    assert weight.format == "mxfp4"
    assert weight.data.shape == (40, 51)
    assert torch.equal(dequantize(weight), values)


@settings(max_examples=40, deadline=None)
@given(codes=st.lists(st.integers(0, 15), min_size=32, max_size=32), exponent=st.integers(-100, 100))
def test_any_codes_under_any_scale_are_held(codes: list[int], exponent: int) -> None:
    """A release need not have the least scale that its codes allow."""
    values = E2M1[torch.tensor([codes])].float() * 2.0**exponent
    weight = whole_numbers(values)
    assert weight is not None
    assert weight.format == "mxfp4"
    assert torch.equal(dequantize(weight), values)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), block=st.sampled_from([(32, 32), (128, 128)]))
def test_released_dense_weights_stay_as_they_are_but_for_the_smallest(
    seed: int, block: tuple[int, int]
) -> None:
    values = released(values_of(seed), "F8_E4M3", block)
    weight, power = whole_numbers(values), largest_powers(values)
    assert weight is not None
    found, held = dequantize(weight), values.abs() >= power / 128
    assert weight.format == "mxfp8"
    assert weight.data.shape == (40, 99)
    assert torch.equal(found[held], values[held])
    assert bool(((found - values).abs() <= power / 2048).all())
    assert float(held.float().mean()) > 0.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_matrices_of_16_and_32_bits_stay_what_they_are(seed: int, dtype: torch.dtype) -> None:
    """Whole numbers would round them."""
    assert whole_numbers(values_of(seed).to(dtype).float()) is None


@pytest.mark.parametrize("value", [0.0, 1.0, -0.375, 2.0**-126, -(2.0**-124), 1.5 * 2.0**127, -6.0])
def test_single_values_at_both_ends_of_float32(value: float) -> None:
    values = torch.zeros(2, 64)
    values[1, 40] = value
    weight = whole_numbers(values)
    assert weight is not None
    torch.testing.assert_close(dequantize(weight), values, rtol=0, atol=2.0**-126)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_a_number_has_no_whole_one(value: float) -> None:
    values = released(values_of(0), "I8", (1, 32))
    assert whole_numbers(values) is not None
    values[3, 5] = value
    assert whole_numbers(values) is None
