"""Products with quantised weights in integers: the arithmetic of the profile `fast`.

Each row of x is rounded to 16 bits in blocks of 32: x is about `scale * q`, with `scale = max|x| / 32767` and
q rounded to nearest, ties to even. A block of weights is `scale * q + minimum` (Q4_1) or `scale * q` (Q8_0,
MXFP4, MXFP8), so that a block adds `scale_x * scale_w * sum(q_x q_w)`, then
`minimum_w * scale_x * sum(q_x)` to the product. Sums over q are whole numbers below 2^31, taken exactly and
rounded once to float32; the blocks are added in ascending order, each by one fused multiply-add, which rounds
once. That is what the C library computes on processors that have such an instruction, to the bit.

Shapes: M rows, K columns in, N columns out, J = K/32 blocks a row, B = 32 columns a block.
"""

import torch
from torch import Tensor

from kernels.limits import BLOCK
from kernels.operations import Weight
from kernels.whole_numbers import FORMATS, values_of

HIGHEST = 32_767  # magnitude of q
_BEHIND_FLOAT32, _HALF_WAY = (1 << 29) - 1, 1 << 28  # of a double's bits
_SUBNORMAL = 2.0**-125
SMALLEST = 1e-30  # a block that is nowhere larger becomes zero: HIGHEST / max|x| would overflow


def integer_product(x_MK: Tensor, weight: Weight) -> Tensor:
    """x times the transpose of a weight in whole numbers, float32 [M, N]. The reference of the C library."""
    q_JMB, scale_JM1 = quantise_rows(x_MK)
    w_JNB, scale_J1N, minimum_J1N = _whole_numbers(weight)
    y_MN = torch.zeros(len(x_MK), weight.rows, device=x_MK.device)
    for j in range(len(q_JMB)):
        q_MB = q_JMB[j].double()  # a double holds every sum
        sums_MN = (q_MB @ w_JNB[j].double().T).float()
        y_MN = multiply_add(sums_MN, scale_J1N[j] * scale_JM1[j], y_MN)
        if minimum_J1N is not None:
            y_MN = multiply_add(minimum_J1N[j], scale_JM1[j] * q_MB.sum(1, keepdim=True).float(), y_MN)
    return y_MN


def multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a b + c of float32, rounded once.

    A double holds the product exactly, and the sum so nearly that rounding it again makes no difference,
    unless it lies half-way between two values of float32, or where those are further apart than usual.
    """
    product = a.double() * b.double()
    total = product + c
    doubtful = ((total.view(torch.int64) & _BEHIND_FLOAT32) == _HALF_WAY) | (total.abs() < _SUBNORMAL)
    if bool(doubtful.any()):
        places = doubtful.nonzero(as_tuple=True)
        total[places] = _with_odd_end(product[places], c.double().expand_as(total)[places])
    return total.float()


def _with_odd_end(a: Tensor, b: Tensor) -> Tensor:
    """a + b in doubles; where that is not exact, of the two around the sum the one whose last bit is odd.

    Rounded to float32, it gives what the exact sum would.
    """
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    even = (total.view(torch.int64) & 1) == 0
    towards = torch.nextafter(total, torch.copysign(torch.full_like(total, torch.inf), error))
    return torch.where((error.abs() > 0) & even, towards, total)


def quantise_rows(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers of -HIGHEST..HIGHEST as float32 [J, M, B], and their scales [J, M, 1]."""
    x_JMB = x_MK.reshape(len(x_MK), -1, BLOCK).transpose(0, 1)
    highest_JM1 = x_JMB.abs().amax(-1, keepdim=True)
    tiny = highest_JM1 < SMALLEST
    scale_JM1 = torch.where(tiny, 0.0, highest_JM1 / HIGHEST)
    # Of two tensors: a number over a tensor is the number times a rounded reciprocal.
    inverse_JM1 = torch.where(tiny, 0.0, torch.full_like(highest_JM1, HIGHEST) / highest_JM1)
    return (x_JMB * inverse_JM1).round(), scale_JM1


def _whole_numbers(weight: Weight) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quants as float32 [J, N, B], scales and, where there are any, minima [J, 1, N]."""
    if weight.format in FORMATS:
        q_NJB, scale_NJ1 = values_of(weight)
        return q_NJB.transpose(0, 1), scale_NJ1.permute(1, 2, 0), None
    blocks_JNX = weight.data.reshape(weight.rows, weight.columns // BLOCK, -1).transpose(0, 1)
    header = 4 if weight.format == "q4_1" else 2
    header_JNX = blocks_JNX[..., :header].contiguous().view(torch.float16).float()
    scale_J1N = header_JNX[:, None, :, 0]
    quants = blocks_JNX[..., header:]
    if weight.format == "q4_1":
        return torch.cat((quants & 15, quants >> 4), -1).float(), scale_J1N, header_JNX[:, None, :, 1]
    return quants.contiguous().view(torch.int8).float(), scale_J1N, None
