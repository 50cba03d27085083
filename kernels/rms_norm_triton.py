# pyright: basic, reportCallIssue=false
# ruff: noqa: ANN001, ANN201, PLR0917
# Triton passes pointers and launch options by its own rules, which the type language does not express.
"""RMSNorm in Triton: one program a row, the whole row in registers.

Shapes: T rows, D features.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def rms_norm_triton(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Launch the kernel on the current CUDA stream; does not block. Any row stride, unit feature stride."""
    num_rows, num_features = x_TD.shape
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    out_TD = torch.empty((num_rows, num_features), dtype=x_TD.dtype, device=x_TD.device)
    if num_rows == 0:
        return out_TD
    block_d = triton.next_power_of_2(num_features)
    rms_norm_kernel[(num_rows,)](
        x_TD,
        weight_D.contiguous(),
        out_TD,
        x_TD.stride(0),
        num_features,
        eps,
        BLOCK_D=block_d,
        num_warps=min(max(block_d // 512, 1), 16),
    )
    return out_TD


@triton.jit
def rms_norm_kernel(x_ptr, weight_ptr, out_ptr, x_row_stride, num_features, eps, BLOCK_D: tl.constexpr):
    # 64-bit row offsets: a long prefill chunk of wide rows passes 2^31 elements.
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    inside = column < num_features
    x = tl.load(x_ptr + row * x_row_stride + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(x * x, axis=0) / num_features + eps)
    out = (x * inverse_rms * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * num_features + column, out, mask=inside)
