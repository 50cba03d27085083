"""Products with quantised weights in integers: the arithmetic of the profile `fast`.

Each row of x is rounded to 16 bits in blocks of 32: x is about `scale * q`, with `scale = max|x| / 32767` and
q rounded to nearest, ties to even. A block of weights is `scale * q + minimum` (Q4_1) or `scale * q` (Q8_0),
so that a block adds `scale_x * scale_w * sum(q_x q_w)`, then `minimum_w * scale_x * sum(q_x)` to the product.
The sums over q are whole numbers below 2^28, taken exactly and rounded once to float32; the blocks are added
in ascending order.

Shapes: M rows, K columns in, N columns out, J = K/32 blocks a row, B = 32 columns a block.
"""

import torch
from torch import Tensor

from kernels.operations import Weight

BLOCK = 32
HIGHEST = 32_767  # magnitude of q
SMALLEST = 1e-30  # a block that is nowhere larger becomes zero: HIGHEST / max|x| would overflow


def integer_product(x_MK: Tensor, weight: Weight) -> Tensor:
    """x times the transpose of a Q4_1 or Q8_0 weight, float32 [M, N]. The reference of the C library."""
    q_JMB, scale_JM1 = quantise_rows(x_MK)
    w_JNB, scale_J1N, minimum_J1N = _whole_numbers(weight)
    y_MN = torch.zeros(len(x_MK), weight.rows, device=x_MK.device)
    for j in range(len(q_JMB)):
        q_MB = q_JMB[j].double()  # a double holds every sum
        y_MN = y_MN + (q_MB @ w_JNB[j].double().T).float() * (scale_J1N[j] * scale_JM1[j])
        y_MN = y_MN + minimum_J1N[j] * (scale_JM1[j] * q_MB.sum(1, keepdim=True).float())
    return y_MN


def quantise_rows(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers of -HIGHEST..HIGHEST as float32 [J, M, B], and their scales [J, M, 1]."""
    x_JMB = x_MK.reshape(len(x_MK), -1, BLOCK).transpose(0, 1)
    highest_JM1 = x_JMB.abs().amax(-1, keepdim=True)
    tiny = highest_JM1 < SMALLEST
    scale_JM1 = torch.where(tiny, 0.0, highest_JM1 / HIGHEST)
    # Of two tensors: a number over a tensor is the number times a rounded reciprocal.
    inverse_JM1 = torch.where(tiny, 0.0, torch.full_like(highest_JM1, HIGHEST) / highest_JM1)
    return (x_JMB * inverse_JM1).round(), scale_JM1


def _whole_numbers(weight: Weight) -> tuple[Tensor, Tensor, Tensor]:
    """Quants as float32 [J, N, B], scales and minima [J, 1, N]."""
    blocks_JNX = weight.data.reshape(weight.rows, weight.columns // BLOCK, -1).transpose(0, 1)
    header = 4 if weight.format == "q4_1" else 2
    header_JNX = blocks_JNX[..., :header].contiguous().view(torch.float16).float()
    scale_J1N = header_JNX[:, None, :, 0]
    quants = blocks_JNX[..., header:]
    if weight.format == "q4_1":
        return torch.cat((quants & 15, quants >> 4), -1).float(), scale_J1N, header_JNX[:, None, :, 1]
    return quants.contiguous().view(torch.int8).float(), scale_J1N, torch.zeros_like(scale_J1N)
