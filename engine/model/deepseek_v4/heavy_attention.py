"""HCA's attention (appendix A.1): window entries, and every compressed entry that a row sees; one softmax.

How many there are depends on the position, so sums go over tiles of 64 entries in order: a tile that a row
does not see adds zeros and changes no bit, whatever rows it runs with.
Shapes: T rows, H heads, D head size, W window, N entries of a sequence, E entries of a tile, M = T*H.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine import numerics
from engine.model.deepseek.core_attention import Entries
from engine.model.deepseek.records import Record
from engine.model.deepseek.rows import Rows
from engine.numerics import Dense
from kernels.operations import Operations

_TILE = 64
_LOGITS = 1 << 22  # float32 values at a time: 16 MiB, or one row's


@dataclass(frozen=True, slots=True)
class Visible:
    """The compressed entries of one sequence, and how many of them each of its rows sees."""

    rows: slice
    entries: Tensor  # int64 [N]
    counts: Tensor  # int64, a number a row

    @classmethod
    def of(cls, rows: Rows, ratio: int) -> "list[Visible]":
        """Of each sequence of a step."""
        return [
            cls(
                part,
                rows.visible_entries(sequence, ratio),
                torch.div(rows.positions_T[part] + 1, ratio, rounding_mode="floor"),
            )
            for sequence in range(len(rows.sequences))
            for part in [rows.row_slice(sequence)]
        ]


@dataclass(frozen=True, slots=True)
class Compressed:
    """A layer's compressed entries as the cache stores them, and what each sequence sees of them."""

    stored: Tensor
    record: Record
    visible: Sequence[Visible]


@dataclass(frozen=True, slots=True)
class _Partial:
    """A row's sums so far: sum_s e^(l_s - top) v_s, and sum_s e^(l_s - top)."""

    weighted: Tensor  # [M, D]
    total: Tensor  # [M]


class HeavyAttention:
    """attend(), with all visible entries in place of selected ones."""

    def __init__(self, sink_H: Tensor, scale: float) -> None:
        self._sink_H, self._scale = sink_H, scale

    def __call__(self, operations: Operations, q_THD: Tensor, window: Entries, far: Compressed) -> Tensor:
        """[T, H, D]."""
        out = torch.empty_like(q_THD)
        for seen in far.visible:
            keys_ND = far.record.decode(far.stored[seen.entries])
            width = (window.index.shape[1] * q_THD.shape[2]) + seen.entries.shape[0] * q_THD.shape[1]
            chunk = max(1, _LOGITS // width)
            for start in range(seen.rows.start, seen.rows.stop, chunk):
                rows = slice(start, min(start + chunk, seen.rows.stop))
                counts_T = seen.counts[start - seen.rows.start :][: rows.stop - start]
                near = Entries(window.pool, window.index[rows])
                out[rows] = self._attend(operations, q_THD[rows], near, keys_ND, counts_T)
        return out

    def _attend(
        self, operations: Operations, q_THD: Tensor, near: Entries, keys_ND: Tensor, counts_T: Tensor
    ) -> Tensor:
        rows, heads, _ = q_THD.shape
        keys_TWD = near.pool.index_select(0, near.index.flatten()).view(*near.index.shape, -1)
        near_THW = numerics.batched_product(q_THD, keys_TWD.transpose(1, 2)).mul_(self._scale)
        near_THW.masked_fill_((near.index == 0)[:, None], -torch.inf)
        top_TH = torch.maximum(near_THW.amax(2), self._sink_H)
        far_THN = torch.empty(rows, heads, 0)
        if keys_ND.shape[0]:
            far_MN = numerics.dot_products(operations, q_THD.flatten(0, 1), keys_ND).mul_(self._scale)
            far_THN = far_MN.view(rows, heads, -1)
            hidden_TN = torch.arange(keys_ND.shape[0]) >= counts_T[:, None]
            far_THN.masked_fill_(hidden_TN[:, None], -torch.inf)
            top_TH = torch.maximum(top_TH, far_THN.amax(2))
        near_THW = near_THW.sub_(top_TH[:, :, None]).exp_()
        near_MD = numerics.batched_product(near_THW, keys_TWD).flatten(0, 1)
        near_M = numerics.tree_sum(near_THW, 2).flatten() + (self._sink_H - top_TH).exp().flatten()
        far_MN = far_THN.sub_(top_TH[:, :, None]).exp_().flatten(0, 1)
        sums = _add_tiles(operations, _Partial(near_MD, near_M), far_MN, keys_ND)
        return (sums.weighted / sums.total[:, None]).view_as(q_THD)


def _add_tiles(operations: Operations, sums: _Partial, weights_MN: Tensor, keys_ND: Tensor) -> _Partial:
    """The sums with those of all tiles, one after the other. A column of ones makes the total."""
    count, width = keys_ND.shape
    missing = -count % _TILE
    weights_MN = F.pad(weights_MN, (0, missing))
    values_ND = F.pad(F.pad(keys_ND, (0, 1), value=1.0), (0, 0, 0, missing))
    for start in range(0, count, _TILE):
        tile = Dense.of(values_ND[start : start + _TILE].T.contiguous())
        weights_ME = weights_MN[:, start : start + _TILE].contiguous()
        product = numerics.linear(operations, weights_ME, (tile,))[0]
        sums = _Partial(sums.weighted + product[:, :width], sums.total + product[:, width])
    return sums
