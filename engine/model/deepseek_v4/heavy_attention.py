"""HCA's attention (appendix A.1): window entries, and every compressed entry that a row sees; one softmax.

Where operations have it in one call, it runs; what is here is the reference. How many entries there are
depends on the position, so its sums go over tiles of 64 of them in order: a tile that a row does not see adds
zeros and changes no bit, whatever rows it runs with.
Shapes: T rows, H heads, D head size, W window, N entries of a sequence, E entries of a tile, M = T*H,
X = D + 1, sums of weighted values and of weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine import numerics
from engine.model.deepseek.core_attention import Entries, reads_caches
from engine.model.deepseek.records import Record, decode
from engine.model.deepseek.rope import Angles, rotate_
from engine.model.deepseek.rows import Rows
from engine.numerics import Dense
from kernels.fused import LANES, EntrySource
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
class _Far:
    """One sequence's entries: as keys, and as values in tiles, each with a column of ones for the total."""

    keys: Tensor  # [N, D]
    tiles: list[Dense]

    @classmethod
    def of(cls, keys_ND: Tensor) -> "_Far":
        missing = -keys_ND.shape[0] % _TILE
        values_ND = F.pad(F.pad(keys_ND, (0, 1), value=1.0), (0, 0, 0, missing))
        starts = range(0, values_ND.shape[0], _TILE)
        return cls(
            keys_ND, [Dense.of(values_ND[at : at + _TILE].T.contiguous(), narrow=False) for at in starts]
        )

    def logits(self, operations: Operations, q_THD: Tensor, counts_T: Tensor) -> Tensor:
        """[T, H, N], unscaled; -inf for entries that a row does not see."""
        count = self.keys.shape[0]
        if count == 0:
            return torch.empty(*q_THD.shape[:2], 0)
        logits_MN = numerics.dot_products(operations, q_THD.flatten(0, 1), self.keys)
        hidden_TN = torch.arange(count) >= counts_T[:, None]
        return logits_MN.view(*q_THD.shape[:2], -1).masked_fill_(hidden_TN[:, None], -torch.inf)


class HeavyAttention:
    """attend(), with all visible entries in place of selected ones."""

    def __init__(self, sink_H: Tensor, scale: float) -> None:
        self._sink_H, self._scale = sink_H, scale

    def __call__(
        self, operations: Operations, q_THD: Tensor, window: Entries, far: Compressed, angles: Angles
    ) -> Tensor:
        """[T, H, D], rotated back by `angles`."""
        if operations.fused is None or q_THD.shape[2] % LANES:
            out_THD = self._composed(operations, q_THD, window, far)
            rotate_(out_THD, angles.inverse())
            return out_THD
        parts: list[Tensor] = []
        for seen in far.visible:
            rows, entries = seen.rows, EntrySource(far.stored, seen.entries, 0, seen.counts)
            if not reads_caches(operations, far.record):
                values = decode(operations, far.record, far.stored[seen.entries])
                entries = EntrySource(values, torch.arange(len(values)), 0, seen.counts)
            near = EntrySource(window.pool, window.index[rows], window.first)
            back = Angles(angles.cos[rows], angles.sin[rows])
            parts.append(
                operations.fused.attend(q_THD[rows], [near, entries], self._sink_H, self._scale, back)
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _composed(self, operations: Operations, q_THD: Tensor, window: Entries, far: Compressed) -> Tensor:
        """Before the rotation. Memory is bounded: rows go in chunks."""
        out = torch.empty_like(q_THD)
        for seen in far.visible:
            entries = _Far.of(decode(operations, far.record, far.stored[seen.entries]))
            width = window.index.shape[1] * q_THD.shape[2] + seen.entries.shape[0] * q_THD.shape[1]
            chunk = max(1, _LOGITS // width)
            for start in range(seen.rows.start, seen.rows.stop, chunk):
                rows = slice(start, min(start + chunk, seen.rows.stop))
                counts_T = seen.counts[start - seen.rows.start :][: rows.stop - start]
                near = Entries(window.pool, window.index[rows])
                far_THN = entries.logits(operations, q_THD[rows], counts_T).mul_(self._scale)
                out[rows] = self._attend(operations, q_THD[rows], near, far_THN, entries.tiles)
        return out

    def _attend(
        self, operations: Operations, q_THD: Tensor, near: Entries, far_THN: Tensor, tiles: list[Dense]
    ) -> Tensor:
        """Changes `far_THN`."""
        keys_TWD = near.pool.index_select(0, near.index.flatten()).view(*near.index.shape, -1)
        near_THW = numerics.batched_product(q_THD, keys_TWD.transpose(1, 2)).mul_(self._scale)
        near_THW.masked_fill_((near.index == 0)[:, None], -torch.inf)
        top_TH = torch.maximum(near_THW.amax(2), self._sink_H)
        if tiles:
            top_TH = torch.maximum(top_TH, far_THN.amax(2))
        near_THW = near_THW.sub_(top_TH[:, :, None]).exp_()
        weighted_MD = numerics.batched_product(near_THW, keys_TWD).flatten(0, 1)
        total_TH = numerics.tree_sum(near_THW, 2) + (self._sink_H - top_TH).exp()
        sums_MX = torch.cat((weighted_MD, total_TH.view(-1, 1)), 1)
        far_MN = far_THN.sub_(top_TH[:, :, None]).exp_().flatten(0, 1)
        for tile, start in zip(tiles, range(0, far_MN.shape[1], _TILE), strict=True):
            weights_ME = far_MN[:, start : start + _TILE]
            weights_ME = F.pad(weights_ME, (0, _TILE - weights_ME.shape[1])).contiguous()
            sums_MX = sums_MX + numerics.linear(operations, weights_ME, (tile,))[0]
        return (sums_MX[:, :-1] / sums_MX[:, -1:]).view_as(q_THD)
