# pyright: basic, reportCallIssue=false
# ruff: noqa: ANN001, ANN201, PLR0917
# Triton passes pointers and launch options by its own rules, which the type language does not express.
"""Q4_1 product in Triton: one program for a tile of (input rows, output features), block after block.

Within a block `sum x_k (scale q_k + minimum) = scale * sum x_k q_k + minimum * sum x_k`. The nibbles q_k are
whole numbers below 16, exact in float16 and bfloat16, so the inner product runs on tensor cores in the
type of `x` with no rounding of the weights; scale and minimum are applied in float32.

The blocks are read in the file's own layout. Its 20-byte stride costs memory transactions that a repacked
layout would save.

Shapes: M rows of input, K input features, N output features, J = K/32 blocks a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# The least row count of a tensor-core product; decode batches are mostly below it.
TILE_ROWS = 16
TILE_OUTPUTS = 32


def q4_1_gemv_triton(x_MK: Tensor, blocks_NJ20: Tensor) -> Tensor:
    """Launch the kernel on the current CUDA stream; does not block."""
    num_rows, num_inputs = x_MK.shape
    num_outputs = blocks_NJ20.shape[0]
    x_MK, blocks_NJ20 = x_MK.contiguous(), blocks_NJ20.contiguous()
    out_MN = torch.empty((num_rows, num_outputs), dtype=x_MK.dtype, device=x_MK.device)
    if num_rows == 0:
        return out_MN
    grid = (triton.cdiv(num_outputs, TILE_OUTPUTS), triton.cdiv(num_rows, TILE_ROWS))
    q4_1_gemv_kernel[grid](
        x_MK,
        blocks_NJ20,
        blocks_NJ20.view(torch.float16),
        out_MN,
        num_rows,
        num_outputs,
        num_inputs // 32,
        BLOCK_M=TILE_ROWS,
        BLOCK_N=TILE_OUTPUTS,
        # Tensors of the host come here only under the interpreter, which multiplies bfloat16 bit patterns.
        WIDEN=not x_MK.is_cuda,
        num_warps=4,
    )
    return out_MN


@triton.jit
def q4_1_gemv_kernel(
    x_ptr,
    bytes_ptr,
    halves_ptr,  # the memory of `bytes_ptr` as float16: 10 a block, the first two are the header
    out_ptr,
    num_rows,
    num_outputs,
    num_blocks,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDEN: tl.constexpr,
):
    output_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_M = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    element_16 = tl.arange(0, 16)
    known_N = output_N < num_outputs
    known_M = row_M < num_rows
    known_M1 = known_M[:, None]
    x_offset_M16 = row_M.to(tl.int64)[:, None] * (num_blocks * 32) + element_16[None, :]
    first_block_N = output_N.to(tl.int64) * num_blocks

    out_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in range(num_blocks):
        block_N = first_block_N + block
        scale_N = tl.load(halves_ptr + block_N * 10, mask=known_N, other=0.0).to(tl.float32)
        minimum_N = tl.load(halves_ptr + block_N * 10 + 1, mask=known_N, other=0.0).to(tl.float32)
        packed_16N = tl.load(
            bytes_ptr + block_N[None, :] * 20 + 4 + element_16[:, None], mask=known_N[None, :], other=0
        )
        low_M16 = tl.load(x_ptr + x_offset_M16 + block * 32, mask=known_M1, other=0.0)
        high_M16 = tl.load(x_ptr + x_offset_M16 + block * 32 + 16, mask=known_M1, other=0.0)
        if WIDEN:
            low_M16 = low_M16.to(tl.float32)
            high_M16 = high_M16.to(tl.float32)

        products_MN = tl.dot(low_M16, (packed_16N & 0xF).to(low_M16.dtype), input_precision="ieee")
        products_MN += tl.dot(high_M16, (packed_16N >> 4).to(high_M16.dtype), input_precision="ieee")
        sum_M = tl.sum(low_M16.to(tl.float32), axis=1) + tl.sum(high_M16.to(tl.float32), axis=1)
        out_MN += scale_N[None, :] * products_MN + minimum_N[None, :] * tl.expand_dims(sum_M, 1)

    out_offset_MN = row_M.to(tl.int64)[:, None] * num_outputs + output_N[None, :]
    tl.store(out_ptr + out_offset_MN, out_MN.to(out_ptr.dtype.element_ty), mask=known_M1 & known_N[None, :])
