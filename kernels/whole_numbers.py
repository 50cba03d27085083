"""Float matrices as whole numbers that share powers of two: the weights of integer products.

Rows fall into blocks of 32 columns, as in OCP's Microscaling formats: a block is `2^(exponent - 127) * q`,
with one byte of exponent, of which 0 stands for a block of zeros, and then the quants. Let 2^e be the largest
power of two that the block's largest value reaches.

- MXFP4: q is twice an E2M1 value. 16 bytes of codes in the order of GGML's blocks: low nibbles are columns
  0..15, high ones 16..31. It holds FP4 exactly.
- MXFP8: q is a significand of -15..15, shifted up by 0..7: in the upper five and the lower three bits of a
  byte. It holds FP8 (E4M3) exactly from 2^e / 128 on; smaller values are rounded to 1/1024 of 2^e.

Other matrices have none of these: whoever stores 16 or 32 bits means them.

Shapes: N rows, K columns, J = K/32 blocks a row, B = 32 columns a block.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.limits import BLOCK
from kernels.operations import Weight, WeightFormat

FORMATS: tuple[WeightFormat, ...] = ("mxfp4", "mxfp8")
E2M1 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)  # doubled

_SIGNIFICAND = 4  # bits of E4M3, the leading one among them
_LONGER = 0x7FFFFF >> (_SIGNIFICAND - 1)  # float32's bits behind those
_CODES = torch.full((13,), 15)  # by doubled magnitude; 15, whose value is none, where there is no code
_CODES[E2M1[:8].long()] = torch.arange(8)
_VALUES_AT_ONCE = 1 << 18  # what is in between fits a processor's cache


def whole_numbers(matrix_NK: Tensor) -> Weight | None:
    """The narrowest format that the values are made for, or None.

    MXFP4 where it holds them all, MXFP8 where none has more significant bits than FP8: a matrix that was
    stored so, under scales that are powers of two. K is a multiple of 32.
    """
    rows, columns = matrix_NK.shape
    assert columns % BLOCK == 0
    if not matrix_NK.isfinite().all():
        return None
    blocks_NJB = matrix_NK.float().reshape(rows, -1, BLOCK)
    for form, make in _MAKERS.items():
        if (data := _in_parts(blocks_NJB, make)) is not None:
            return Weight(data.flatten(1), rows, columns, form)
    return None


def values_of(weight: Weight) -> tuple[Tensor, Tensor]:
    """Of an unpacked weight: whole numbers as float32 [N, J, B], and their scales [N, J, 1]."""
    blocks_NJX = weight.data.view(weight.rows, weight.columns // BLOCK, -1)
    scale_NJ1 = (blocks_NJX[..., :1].int() << 23).view(torch.float32)
    quants = blocks_NJX[..., 1:]
    if weight.format == "mxfp4":
        return E2M1[torch.cat((quants & 15, quants >> 4), -1).long()].float(), scale_NJ1
    signed = quants.contiguous().view(torch.int8).int()
    return ((signed >> 3) << (signed & 7)).float(), scale_NJ1


def _in_parts(x_NJB: Tensor, make: Callable[[Tensor], Tensor | None]) -> Tensor | None:
    """All rows as `make` has them, or None where it has some not."""
    step = max(1, _VALUES_AT_ONCE // x_NJB[0].numel())
    made: list[Tensor] = []
    for start in range(0, x_NJB.shape[0], step):
        if (found := make(x_NJB[start : start + step])) is None:
            return None
        made.append(found)
    return torch.cat(made)


def _as_mxfp4(x_NJB: Tensor) -> Tensor | None:
    """uint8 [N, J, 17], or None where a value is none of the format's."""
    largest = _largest(x_NJB)
    # The least power of two that brings the largest value to 12 at most; a coarser one holds no value more.
    exponents = _exponent(largest) - 3 + ((largest.view(torch.int32) & 0x7FFFFF) > 0x400000)
    if bool(((exponents < 1) & (largest > 0)).any()):
        return None
    q = _scaled(x_NJB, exponents := exponents.where(largest > 0, 0))
    codes = _CODES[q.abs().long()]
    if not torch.equal(E2M1[codes].double(), q.abs()):
        return None
    codes += 8 * (q < 0)
    return torch.cat((exponents, codes[..., :16] | codes[..., 16:] << 4), -1).to(torch.uint8)


def _as_mxfp8(x_NJB: Tensor) -> Tensor | None:
    """uint8 [N, J, 33], or None where a value has more significant bits than the format."""
    if bool((x_NJB.view(torch.int32) & _LONGER).any()):
        return None
    exponents = _exponents(x_NJB, _SIGNIFICAND - 1 + 7)
    q = _scaled(x_NJB, exponents).round().float()
    shifts = (_exponent(q.abs()) - 127 - (_SIGNIFICAND - 1)).clamp(min=0)
    significands = q.int() >> shifts
    return torch.cat((exponents, significands << 3 | shifts), -1).to(torch.uint8)


_MAKERS: dict[WeightFormat, Callable[[Tensor], Tensor | None]] = {
    "mxfp4": _as_mxfp4,
    "mxfp8": _as_mxfp8,
}


def _largest(x_NJB: Tensor) -> Tensor:
    """[N, J, 1]."""
    return x_NJB.abs().amax(-1, keepdim=True)


def _exponents(x_NJB: Tensor, below: int) -> Tensor:
    """Int32 [N, J, 1]: so many bits below e. Blocks at the lower end of float32 lose some of those."""
    largest = _largest(x_NJB)
    return (_exponent(largest) - below).clamp(min=1).where(largest > 0, 0)


def _exponent(x: Tensor) -> Tensor:
    """float32's own, biased by 127, of values that are not negative."""
    return x.view(torch.int32) >> 23


def _scaled(x_NJB: Tensor, exponents: Tensor) -> Tensor:
    """Blocks over their powers, exactly, in float64; zeros where there are none."""
    return torch.ldexp(x_NJB.double(), 127 - exponents).where(exponents > 0, 0.0)
