"""Attention of one new token a sequence over keys and values that lie in blocks of a shared pool.

Position p of sequence b is slot `p % S` of block `block_tables_BP[b, p // S]`. Query head h reads key-value
head `h // (H / G)` (grouped-query attention, Ainslie et al., 2023).

Shapes: B sequences, H query heads, G key-value heads, D features a head, N blocks in the pool, S slots a
block, P blocks a table, L positions of one sequence.
"""

import torch
from torch import Tensor

from kernels.triton_door import require_triton


def paged_attention(
    q_BHD: Tensor,
    k_cache_NSGD: Tensor,
    v_cache_NSGD: Tensor,
    block_tables_BP: Tensor,
    context_lens_B: Tensor,
    *,
    scale: float,
) -> Tensor:
    """`softmax(scale * q k^T) v` over the first `context_lens_B[b]` positions of each sequence: [B, H, D].

    The new token's own key and value are already in the cache and counted in the context length. A context
    of 0 marks a padding row and gives zeros. Tables and lengths are int32 on the device of `q`; entries of
    a table beyond its context are never read, so they may hold anything. Accumulates in float32.

    CPU tensors take the PyTorch reference, CUDA tensors the Triton kernel. Raises `MissingCapability` for a
    CUDA tensor without Triton.
    """
    num_sequences, num_heads, head_dim = q_BHD.shape
    assert k_cache_NSGD.shape == v_cache_NSGD.shape, (k_cache_NSGD.shape, v_cache_NSGD.shape)
    assert k_cache_NSGD.shape[3] == head_dim, (k_cache_NSGD.shape, q_BHD.shape)
    assert num_heads % k_cache_NSGD.shape[2] == 0, (k_cache_NSGD.shape, q_BHD.shape)
    assert block_tables_BP.shape[0] == num_sequences == context_lens_B.shape[0], block_tables_BP.shape
    if not q_BHD.is_cuda:
        return paged_attention_reference(
            q_BHD, k_cache_NSGD, v_cache_NSGD, block_tables_BP, context_lens_B, scale=scale
        )
    require_triton("paged_attention")
    from kernels.paged_attention_triton import paged_attention_triton

    return paged_attention_triton(
        q_BHD, k_cache_NSGD, v_cache_NSGD, block_tables_BP, context_lens_B, scale=scale
    )


def paged_attention_reference(
    q_BHD: Tensor,
    k_cache_NSGD: Tensor,
    v_cache_NSGD: Tensor,
    block_tables_BP: Tensor,
    context_lens_B: Tensor,
    *,
    scale: float,
) -> Tensor:
    """The same function in plain PyTorch, one sequence after the other, on any device."""
    num_kv_heads, head_dim = k_cache_NSGD.shape[2:]
    out_BHD = torch.zeros_like(q_BHD)
    for b in range(q_BHD.shape[0]):
        context_len = int(context_lens_B[b])
        if context_len == 0:
            continue
        k_LGD = gather_context(k_cache_NSGD, block_tables_BP[b], context_len).to(torch.float32)
        v_LGD = gather_context(v_cache_NSGD, block_tables_BP[b], context_len).to(torch.float32)
        # The query heads that share one key-value head are neighbours: [H, D] -> [G, H/G, D].
        q_GRD = q_BHD[b].to(torch.float32).reshape(num_kv_heads, -1, head_dim)
        scores_GRL = torch.einsum("grd,lgd->grl", q_GRD, k_LGD) * scale
        out_GRD = torch.einsum("grl,lgd->grd", scores_GRL.softmax(dim=-1), v_LGD)
        out_BHD[b] = out_GRD.reshape(-1, head_dim).to(q_BHD.dtype)
    return out_BHD


def gather_context(cache_NSGD: Tensor, block_table_P: Tensor, context_len: int) -> Tensor:
    """The first `context_len` positions of one sequence in order, copied out of the pool: [L, G, D]."""
    block_size = cache_NSGD.shape[1]
    num_blocks = -(-context_len // block_size)
    return torch.flatten(cache_NSGD[block_table_P[:num_blocks].long()], 0, 1)[:context_len]
