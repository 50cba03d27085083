"""Stored weights to float32 values and back: FP8 in blocks, FP4 in groups, bfloat16, float32.

Shapes: N rows, K columns, B bytes a row. Scales are powers of two, one a block, and are handled as raw
bytes: as numbers they would be converted, and destroyed. Source: fact sheet, sections 3, 4 and 11.2.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.checkpoint.entries import GROUP
from engine.model.deepseek.quantisation import (
    E2M1_MAX,
    E4M3_MAX,
    e2m1_codes,
    e4m3_bytes,
    e4m3_values,
    e8m0_values,
    pack_e2m1,
    power_of_two_scales,
    unpack_e2m1,
)
from protocol.errors import InvalidInput

_PACKED = {"F8_E4M3": 1, "I8": 2}  # values a byte
_VALUES_AT_ONCE = 1 << 18  # what is in between fits a processor's cache, and leaves no holes between weights
_LEAST = 2.0**-126  # the smallest normal float32: what is nearer to zero has the scale of zero


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight as its file has it, memory-mapped: `values` [N, K] or [N, K/2] bytes, `scales` E8M0 bytes.

    `block`: rows and columns of one scale. `scales` is None for plain tensors.
    """

    dtype: str
    values: Tensor
    scales: Tensor | None = None
    block: tuple[int, int] = (1, 1)


def raw_bytes(tensor: Tensor) -> Tensor:
    """The same memory as uint8, for the types of one byte."""
    return tensor.view(torch.uint8)


def dequantise(weight: StoredWeight) -> Tensor:
    """float32 values, contiguous and in memory of their own."""
    if weight.scales is None and weight.dtype not in _PACKED:
        return weight.values.to(torch.float32, copy=True).contiguous()
    rows, columns = weight.values.shape
    values_NK = torch.empty(rows, columns * _PACKED.get(weight.dtype, 1))
    high = weight.block[0]
    stretch = -(-_VALUES_AT_ONCE // (values_NK.shape[1] * high)) * high
    for start in range(0, rows, stretch):
        _dequantise_rows(weight, slice(start, start + stretch), values_NK[start : start + stretch])
    return values_NK


def _dequantise_rows(weight: StoredWeight, rows: slice, out_NK: Tensor) -> None:
    match weight.dtype:
        case "F8_E4M3":
            values_NK = e4m3_values(raw_bytes(weight.values[rows]))
        case "I8":
            values_NK = unpack_e2m1(raw_bytes(weight.values[rows]))
        case _:
            values_NK = weight.values[rows].float()
    if weight.scales is None:
        out_NK.copy_(values_NK)
        return
    high = weight.block[0]
    scales = _scale_values(weight.scales[rows.start // high : -(-rows.stop // high)])
    torch.mul(values_NK, _spread(scales, weight.block, values_NK), out=out_NK)


def _scale_values(scales: Tensor) -> Tensor:
    """E8M0 bytes, or the float32 of base models (appendix A.1)."""
    return scales if scales.dtype == torch.float32 else e8m0_values(raw_bytes(scales))


def quantise(values_NK: Tensor, dtype: str, block: tuple[int, int]) -> tuple[Tensor, ...]:
    """The tensors to store: values, and scales where the type has them. Rounds each value once, to nearest.

    Raises InvalidInput: values that are not finite, or rows that do not fill FP4's groups.
    """
    if not values_NK.isfinite().all():
        raise InvalidInput("a value is infinite or not a number")
    match dtype:
        case "F8_E4M3":
            scales = _scales(values_NK, block, E4M3_MAX)
            return e4m3_bytes(_scaled(values_NK, scales, block)).view(torch.float8_e4m3fn), as_e8m0(scales)
        case "I8":
            if values_NK.shape[-1] % GROUP:
                raise InvalidInput(f"rows of {values_NK.shape[-1]} values do not fill groups of {GROUP}")
            scales = _scales(values_NK, block, E2M1_MAX)
            codes = e2m1_codes(_scaled(values_NK, scales, block))
            return pack_e2m1(codes).view(torch.int8), as_e8m0(scales)
        case "BF16":
            return (values_NK.to(torch.bfloat16),)
        case _:
            return (values_NK.contiguous(),)


def as_e8m0(scales: Tensor) -> Tensor:
    """Bytes under the type that safetensors writes as F8_E8M0."""
    return scales.view(torch.float8_e8m0fnu)


def _scales(values_NK: Tensor, block: tuple[int, int], largest: float) -> Tensor:
    """One byte for each block: the least power of two that brings its largest value into the format."""
    high, wide = block
    rows, columns = values_NK.shape
    padded = values_NK.new_zeros((rows + -rows % high, columns + -columns % wide))
    padded[:rows, :columns] = values_NK
    amax = padded.abs_().view(-1, high, padded.shape[1] // wide, wide).amax((1, 3))
    return power_of_two_scales(amax.clamp(min=_LEAST * largest), largest)


def _scaled(values_NK: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    return values_NK * _spread(e8m0_values(254 - scales), block, values_NK)  # 254 - byte is the reciprocal's


def _spread(scales: Tensor, block: tuple[int, int], like_NK: Tensor) -> Tensor:
    """Each block's scale at each of its values."""
    rows, columns = like_NK.shape
    return scales.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
