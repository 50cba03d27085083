"""`Operations` in plain PyTorch: the reference of the C library, and the fallback where no compiler is.

Products run in zero-padded tiles of 16 rows, in which a row's bits do not depend on its neighbours; attention
runs row by row over a whole number of blocks, so that its shapes depend on the row's own position alone.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.operations import Rows, Weight

TILE_ROWS = 16
_BLOCK = 32  # weights a quantisation block


class TorchOperations:
    """Slow and plain. Weights are dequantised at every use."""

    name = "torch"

    def gather(self, table: Weight, ids: Tensor) -> Tensor:
        picked = Weight(table.data[ids], len(ids), table.columns, table.format)
        return dequantize(picked)

    def linear(self, x_MK: Tensor, weights: Sequence[Weight]) -> list[Tensor]:
        return [self._product(x_MK, dequantize(weight)) for weight in weights]

    def rms_norm(self, x_MK: Tensor, weight_K: Tensor, eps: float) -> Tensor:
        scale = torch.rsqrt(x_MK.square().mean(-1, keepdim=True) + eps)
        return x_MK * scale * weight_K

    def rope_(self, x_MHD: Tensor, table_PD: Tensor, positions_M: Tensor) -> None:
        angles = table_PD[positions_M].unsqueeze(1)
        cos, sin = angles[..., 0::2], angles[..., 1::2]
        a, b = x_MHD[..., 0::2], x_MHD[..., 1::2]
        x_MHD.copy_(torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2))

    def silu_mul(self, gate_MK: Tensor, up_MK: Tensor) -> Tensor:
        return F.silu(gate_MK) * up_MK

    def store_kv(self, cache: Tensor, rows: Rows, k_MGD: Tensor, v_MGD: Tensor) -> None:
        block = cache.shape[2]
        blocks = rows.tables[rows.sequences, rows.positions // block].long()
        slots = rows.positions % block
        cache[blocks, 0, slots] = k_MGD
        cache[blocks, 1, slots] = v_MGD

    def paged_attention(self, q_MHD: Tensor, cache: Tensor, rows: Rows, scale: float) -> Tensor:
        out = torch.empty_like(q_MHD)
        for row in range(q_MHD.shape[0]):
            out[row] = self._attend(q_MHD[row], cache, rows, row, scale)
        return out

    def _attend(self, q_HD: Tensor, cache: Tensor, rows: Rows, row: int, scale: float) -> Tensor:
        position = int(rows.positions[row])
        table = rows.tables[rows.sequences[row], : position // cache.shape[2] + 1].long()
        keys_TGD, values_TGD = (cache[table, which].flatten(0, 1) for which in (0, 1))
        group = q_HD.shape[0] // keys_TGD.shape[1]
        q_GRD = q_HD.reshape(-1, group, q_HD.shape[1])
        scores_GRT = torch.einsum("grd,tgd->grt", q_GRD, keys_TGD) * scale
        scores_GRT[..., position + 1 :] = -torch.inf
        weights_GRT = torch.softmax(scores_GRT, -1)
        values_TGD = torch.where(torch.arange(len(values_TGD))[:, None, None] > position, 0.0, values_TGD)
        return torch.einsum("grt,tgd->grd", weights_GRT, values_TGD).flatten(0, 1)

    def _product(self, x_MK: Tensor, w_NK: Tensor) -> Tensor:
        m = x_MK.shape[0]
        padded = F.pad(x_MK, (0, 0, 0, -m % TILE_ROWS))
        tiles = [padded[start : start + TILE_ROWS] @ w_NK.T for start in range(0, len(padded), TILE_ROWS)]
        return torch.cat(tiles)[:m]


def dequantize(weight: Weight) -> Tensor:
    """float32 [N, K] of a weight. Block layouts are those of GGML's Q4_1 and Q8_0."""
    if weight.format == "f32":
        return weight.data
    blocks = weight.data.reshape(weight.data.shape[0], weight.columns // _BLOCK, -1)
    if weight.format == "q4_1":
        scale, minimum, packed = _half(blocks[..., :2]), _half(blocks[..., 2:4]), blocks[..., 4:]
        quants = torch.cat((packed & 15, packed >> 4), -1).float()
        return (quants * scale + minimum).flatten(1)
    return (blocks[..., 2:].contiguous().view(torch.int8).float() * _half(blocks[..., :2])).flatten(1)


def _half(pairs: Tensor) -> Tensor:
    """float32 of little-endian float16 bytes [..., 2]."""
    return pairs.contiguous().view(torch.float16).float()
