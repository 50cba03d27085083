"""Product with a weight that stays in GGUF's Q4_1 blocks.

A block holds 32 neighbouring weights of one output row in 20 bytes: a float16 scale, a float16 minimum, and
16 bytes of nibbles, low nibbles for elements 0..15 and high nibbles for 16..31. A weight is
`scale * nibble + minimum`.

Shapes: M rows of input, K input features, N output features, J = K/32 blocks a row.
"""

import torch
from torch import Tensor

from kernels.triton_door import require_triton

BLOCK_WEIGHTS = 32
BLOCK_BYTES = 20
HEADER_BYTES = 4


def q4_1_gemv(x_MK: Tensor, blocks_NJ20: Tensor) -> Tensor:
    """`x @ dequantised(blocks)^T`, accumulated in float32, in the type of `x`: [M, N].

    `blocks_NJ20` is the uint8 tensor as it stands in the file. Meant for few rows (decode); it is correct
    for any number. CPU tensors take the PyTorch reference, CUDA tensors the Triton kernel. Raises
    `MissingCapability` for a CUDA tensor without Triton.
    """
    num_outputs, num_blocks, _ = blocks_NJ20.shape
    assert blocks_NJ20.dtype == torch.uint8, blocks_NJ20.dtype
    assert blocks_NJ20.shape == (num_outputs, num_blocks, BLOCK_BYTES), blocks_NJ20.shape
    assert x_MK.shape == (x_MK.shape[0], num_blocks * BLOCK_WEIGHTS), (x_MK.shape, blocks_NJ20.shape)
    if not x_MK.is_cuda:
        return q4_1_gemv_reference(x_MK, blocks_NJ20)
    require_triton("q4_1_gemv")
    from kernels.q4_1_gemv_triton import q4_1_gemv_triton

    return q4_1_gemv_triton(x_MK, blocks_NJ20)


def q4_1_gemv_reference(x_MK: Tensor, blocks_NJ20: Tensor) -> Tensor:
    """The same function in plain PyTorch: the whole weight in float32, then one product."""
    return (x_MK.to(torch.float32) @ dequantise_q4_1(blocks_NJ20).T).to(x_MK.dtype)


def dequantise_q4_1(blocks_NJ20: Tensor) -> Tensor:
    """The weights of Q4_1 blocks as float32 [N, K], on the device of the blocks."""
    header_NJ2 = blocks_NJ20[..., :HEADER_BYTES].contiguous().view(torch.float16).to(torch.float32)
    scale_NJ1, minimum_NJ1 = header_NJ2[..., :1], header_NJ2[..., 1:]
    nibbles_NJ16 = blocks_NJ20[..., HEADER_BYTES:]
    quants_NJ32 = torch.cat((nibbles_NJ16 & 0x0F, nibbles_NJ16 >> 4), dim=-1).to(torch.float32)
    return torch.flatten(scale_NJ1 * quants_NJ32 + minimum_NJ1, start_dim=1)
