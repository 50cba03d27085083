"""`Operations` on PyTorch: the reference of the C library, the fallback where no compiler is, and the way to
the Triton kernels, which each operation takes for tensors on a GPU.

On the CPU products run in zero-padded tiles of 16 rows, in which a row's bits do not depend on its
neighbours; attention runs row by row, so that its shapes depend on the row's own position alone.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.decoder import run_layers
from kernels.integer_product import integer_product
from kernels.limits import BLOCK
from kernels.operations import Decoder, DecoderStack, Profile, Rope, Rows, Weight
from kernels.paged_attention import paged_attention
from kernels.q4_1_gemv import dequantise_q4_1, q4_1_gemv
from kernels.reductions import one_thread
from kernels.rms_norm import rms_norm
from kernels.rope import rope as rotate
from kernels.whole_numbers import FORMATS, values_of

TILE_ROWS = 16
_CUT_COLUMNS = 32  # a multiple: threads then get whole vectors, and round as one does


class TorchOperations:
    """Slow and plain. Weights are dequantised at every use."""

    name = "torch"
    fused = None

    def __init__(self, profile: Profile = "exact") -> None:
        self.profile: Profile = profile

    def prepare(self, weight: Weight) -> Weight:
        return weight

    def gather(self, table: Weight, ids: Tensor) -> Tensor:
        picked = Weight(table.data[ids], len(ids), table.columns, table.format)
        return dequantize(picked)

    def linear(self, x_MK: Tensor, weights: Sequence[Weight]) -> list[Tensor]:
        return [
            integer_product(x_MK, weight)
            if self.profile == "fast" and weight.format not in {"f32", "bf16"}
            else self._product(x_MK, weight)
            for weight in weights
        ]

    def rms_norm(self, x_MK: Tensor, weight_K: Tensor, eps: float) -> Tensor:
        return rms_norm(x_MK, weight_K, eps)

    def rope_(self, x_MHD: Tensor, rope: Rope, positions_M: Tensor) -> None:
        x_MHD.copy_(rotate(x_MHD, positions_M, rope.theta))

    def silu_mul(self, gate_MK: Tensor, up_MK: Tensor) -> Tensor:
        return F.silu(gate_MK) * up_MK

    def store_kv(self, cache: Tensor, rows: Rows, k_MGD: Tensor, v_MGD: Tensor) -> None:
        block = cache.shape[2]
        blocks = rows.tables[rows.sequences, rows.positions // block].long()
        slots = rows.positions % block
        cache[blocks, 0, slots] = k_MGD
        cache[blocks, 1, slots] = v_MGD

    def paged_attention(self, q_MHD: Tensor, cache: Tensor, rows: Rows, scale: float) -> Tensor:
        tables, lengths = rows.tables[rows.sequences], (rows.positions + 1).int()
        return paged_attention(q_MHD, cache[:, 0], cache[:, 1], tables, lengths, scale=scale)

    def decoder(self, stack: DecoderStack) -> Decoder:
        return partial(run_layers, self, stack)

    def _product(self, x_MK: Tensor, weight: Weight) -> Tensor:
        if x_MK.is_cuda and weight.format == "q4_1":
            return q4_1_gemv(x_MK, weight.data.reshape(weight.rows, weight.columns // BLOCK, -1))
        m, w_NK = x_MK.shape[0], dequantize(weight)
        padded = F.pad(x_MK, (0, 0, 0, -m % TILE_ROWS))
        with one_thread() if weight.rows % _CUT_COLUMNS else nullcontext():
            tiles = [padded[start : start + TILE_ROWS] @ w_NK.T for start in range(0, len(padded), TILE_ROWS)]
        return torch.cat(tiles)[:m] if tiles else x_MK.new_empty(0, weight.rows)


def dequantize(weight: Weight) -> Tensor:
    """float32 [N, K] of a weight. Block layouts of Q4_1 and Q8_0 are GGML's."""
    if weight.format in {"f32", "bf16"}:
        return weight.data.float()
    if weight.format in FORMATS:
        q_NJB, scale_NJ1 = values_of(weight)
        return (q_NJB * scale_NJ1).flatten(1)
    blocks = weight.data.reshape(weight.data.shape[0], weight.columns // BLOCK, -1)
    if weight.format == "q4_1":
        return dequantise_q4_1(blocks)
    scale = blocks[..., :2].contiguous().view(torch.float16).float()
    return (blocks[..., 2:].contiguous().view(torch.int8).float() * scale).flatten(1)
