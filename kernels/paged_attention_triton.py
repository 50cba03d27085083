# pyright: basic, reportCallIssue=false
# ruff: noqa: ANN001, ANN201, PLR0917
# Triton passes pointers and launch options by its own rules, which the type language does not express.
"""Paged decode attention in Triton: one program for each (sequence, key-value head).

A program holds the query heads that share its key-value head, and walks the context in tiles of a fixed
number of positions, in order, with a running softmax (Milakov and Gimelshein, 2018). The order depends on
neither the batch nor the block size, so a row's result does not depend on its neighbours. The context is
not split among programs: long contexts with few sequences leave part of a GPU idle.

Shapes: B sequences, H query heads, G key-value heads, R = H/G, D features a head, N blocks, S slots a block,
P blocks a table, L = positions of one tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_POSITIONS = 32
# The least row count and depth of a tensor-core product.
MIN_DOT = 16


def paged_attention_triton(
    q_BHD: Tensor,
    k_cache_NSGD: Tensor,
    v_cache_NSGD: Tensor,
    block_tables_BP: Tensor,
    context_lens_B: Tensor,
    *,
    scale: float,
) -> Tensor:
    """Launch the kernel on the current CUDA stream; does not block. The caches are read in place."""
    num_sequences, num_heads, head_dim = q_BHD.shape
    _, block_size, num_kv_heads, _ = k_cache_NSGD.shape
    assert k_cache_NSGD.stride() == v_cache_NSGD.stride(), "the two caches are laid out alike"
    assert k_cache_NSGD.stride(3) == 1, "the features of a slot are neighbours"
    q_BHD, block_tables_BP = q_BHD.contiguous(), block_tables_BP.contiguous()
    out_BHD = torch.empty_like(q_BHD)
    if num_sequences == 0:
        return out_BHD
    group = num_heads // num_kv_heads
    paged_attention_kernel[(num_sequences, num_kv_heads)](
        q_BHD,
        k_cache_NSGD,
        v_cache_NSGD,
        block_tables_BP,
        context_lens_B.contiguous(),
        out_BHD,
        scale,
        block_tables_BP.shape[1],
        k_cache_NSGD.stride(0),
        k_cache_NSGD.stride(1),
        k_cache_NSGD.stride(2),
        NUM_HEADS=num_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_R=max(triton.next_power_of_2(group), MIN_DOT),
        BLOCK_D=max(triton.next_power_of_2(head_dim), MIN_DOT),
        BLOCK_L=TILE_POSITIONS,
        # Tensors of the host come here only under the interpreter, which multiplies bfloat16 bit patterns.
        WIDEN=not q_BHD.is_cuda,
        num_warps=4,
    )
    return out_BHD


@triton.jit
def paged_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    lengths_ptr,
    out_ptr,
    scale,
    table_stride,
    cache_block_stride,
    cache_slot_stride,
    cache_head_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_L: tl.constexpr,
    WIDEN: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    row = tl.arange(0, BLOCK_R)[:, None]
    feature = tl.arange(0, BLOCK_D)[None, :]
    inside_RD = (row < GROUP) & (feature < HEAD_DIM)
    q_offset_RD = (sequence * NUM_HEADS + kv_head * GROUP + row) * HEAD_DIM + feature
    q_RD = tl.load(q_ptr + q_offset_RD, mask=inside_RD, other=0.0)
    if WIDEN:
        q_RD = q_RD.to(tl.float32)

    context_len = tl.load(lengths_ptr + sequence)
    maximum_R = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    total_R = tl.zeros((BLOCK_R,), tl.float32)
    out_RD = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for start in range(0, context_len, BLOCK_L):
        position = start + tl.arange(0, BLOCK_L)
        known_L = position < context_len
        # 64-bit: a pool of many gigabytes has more than 2^31 elements.
        block_L = tl.load(
            tables_ptr + sequence * table_stride + position // BLOCK_SIZE, mask=known_L, other=0
        ).to(tl.int64)
        slot_offset_L = block_L * cache_block_stride + (position % BLOCK_SIZE) * cache_slot_stride
        offset_LD = slot_offset_L[:, None] + kv_head * cache_head_stride + feature
        inside_LD = known_L[:, None] & (feature < HEAD_DIM)
        k_LD = tl.load(k_ptr + offset_LD, mask=inside_LD, other=0.0)
        v_LD = tl.load(v_ptr + offset_LD, mask=inside_LD, other=0.0)
        if WIDEN:
            k_LD = k_LD.to(tl.float32)
            v_LD = v_LD.to(tl.float32)

        scores_RL = tl.dot(q_RD, tl.trans(k_LD), input_precision="ieee") * scale
        scores_RL = tl.where(known_L[None, :], scores_RL, float("-inf"))
        # Every tile has at least one known position, so the new maximum is finite.
        new_maximum_R = tl.maximum(maximum_R, tl.max(scores_RL, axis=1))
        shrink_R = tl.exp(maximum_R - new_maximum_R)
        weights_RL = tl.exp(scores_RL - new_maximum_R[:, None])
        total_R = total_R * shrink_R + tl.sum(weights_RL, axis=1)
        out_RD = out_RD * shrink_R[:, None]
        out_RD += tl.dot(weights_RL.to(v_LD.dtype), v_LD, input_precision="ieee")
        maximum_R = new_maximum_R

    # An empty context has total 0 and out 0: the padding row is zeros, not 0/0.
    out_RD = out_RD / tl.where(total_R > 0.0, total_R, 1.0)[:, None]
    tl.store(out_ptr + q_offset_RD, out_RD.to(out_ptr.dtype.element_ty), mask=inside_RD)
