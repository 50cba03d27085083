# pyright: basic, reportCallIssue=false
# ruff: noqa: ANN001, ANN201, PLR0917
# Triton passes pointers and launch options by its own rules, which the type language does not express.
"""RoPE over adjacent pairs in Triton: one program a row, all heads of the row in registers.

Shapes: T rows, H heads, D features a head, P = D/2 pairs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.rope import rope_frequencies


def rope_triton(x_THD: Tensor, positions_T: Tensor, theta: float) -> Tensor:
    """Launch the kernel on the current CUDA stream; does not block."""
    num_rows, num_heads, head_dim = x_THD.shape
    x_THD = x_THD.contiguous()
    out_THD = torch.empty_like(x_THD)
    if num_rows == 0:
        return out_THD
    rope_kernel[(num_rows,)](
        x_THD,
        positions_T.contiguous(),
        rope_frequencies(head_dim, theta, x_THD.device),
        out_THD,
        num_heads,
        HALF_D=head_dim // 2,
        BLOCK_H=triton.next_power_of_2(num_heads),
        BLOCK_P=triton.next_power_of_2(head_dim // 2),
        num_warps=4,
    )
    return out_THD


@triton.jit
def rope_kernel(
    x_ptr,
    positions_ptr,
    frequencies_ptr,
    out_ptr,
    num_heads,
    HALF_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_H)[:, None]
    pair = tl.arange(0, BLOCK_P)[None, :]
    inside = (head < num_heads) & (pair < HALF_D)

    frequency = tl.load(frequencies_ptr + pair, mask=pair < HALF_D, other=0.0)
    # Whole turns are taken off in float64; cos and sin of float64 would need a stack for far angles.
    turns = tl.load(positions_ptr + row).to(tl.float64) * frequency.to(tl.float64) * 0.15915494309189535
    angle = ((turns - tl.floor(turns + 0.5)) * 6.283185307179586).to(tl.float32)
    cos, sin = tl.cos(angle), tl.sin(angle)

    offset = (row * num_heads + head) * (2 * HALF_D) + 2 * pair
    even = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(x_ptr + offset + 1, mask=inside, other=0.0).to(tl.float32)
    out_type = out_ptr.dtype.element_ty
    tl.store(out_ptr + offset, (even * cos - odd * sin).to(out_type), mask=inside)
    tl.store(out_ptr + offset + 1, (odd * cos + even * sin).to(out_type), mask=inside)
