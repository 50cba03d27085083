"""What drafts know of a sequence: the streams that enter the target layers, and a window of entries of them.

Shapes: T rows, C channels, X channels of all target layers together, B draft blocks, W window, F flat rows
(slots times their rows), S sequences, R rows of a draft.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine import numerics
from engine.errors import BrokenHandoff
from engine.model.deepseek.config import DeepseekConfig
from engine.model.deepseek.hyper_connections import Stream
from engine.model.deepseek.records import Records
from engine.model.deepseek.rope import Angles, RotaryTable
from engine.model.deepseek.rows import Rows


@dataclass(frozen=True, slots=True)
class Anchor:
    """Where a draft begins: a sequence's newest token, which the model has not run yet.

    Context lies in positions context_from .. position - 1, and of these the last W are read. Where a slot has
    less than the sequence (behind a cached prefix, after a hand-off without it) `context_from` says so.
    """

    slot: int
    token_id: int
    position: int
    context_from: int = 0


class StreamTap:
    """The observer that keeps what drafts read of one forward step of the model (section 8.1)."""

    def __init__(self, config: DeepseekConfig) -> None:
        self._layers = [layer - 1 for layer in config.dspark_target_layer_ids]  # they leave what enters
        self._means: dict[int, Tensor] = {}
        self.rows: Rows | None = None  # those that the target layers see; None: none of the step's

    def left(self, layer: int, stream: Stream, rows: Rows) -> None:
        if layer in self._layers:
            self._means[layer] = numerics.tree_sum(stream.x, 1) / stream.x.shape[1]
            self.rows = rows

    def selected(self, layer: int, groups_TK: Tensor, blocks: dict[int, Tensor], rows: Rows) -> None:
        """Of no use here."""

    def entering(self, picked: Tensor) -> Tensor:
        """[T, X] of those of `rows` that are picked: the streams' mean, layer beside layer."""
        return torch.cat([self._means[layer][picked] for layer in self._layers], 1)


class DraftCache:
    """The window of each draft block and slot, in the released record or float32; 0.2 MB a slot released.

    Tensors only: who owns which slot is the caller's.
    """

    def __init__(self, config: DeepseekConfig, num_slots: int) -> None:
        self.record, self.window, self.num_slots = Records.of(config).window, config.sliding_window, num_slots
        shape = (config.num_nextn_predict_layers, num_slots * self.window, self.record.width)
        self.rings_BF = torch.zeros(shape, dtype=self.record.dtype)

    def slot_bytes(self) -> int:
        """Of one sequence."""
        return self.rings_BF.numel() * self.rings_BF.element_size() // self.num_slots

    def export_slot(self, slot: int, stop: int, context_from: int = 0) -> NDArray[np.uint8]:
        """A copy of the context up to position `stop`, for a slot elsewhere. Equal states are equal bytes."""
        rows, present = self._last(slot, stop, context_from)
        piece = self.rings_BF[:, rows].view(torch.uint8).clone()
        return piece.masked_fill_(~present[None, :, None], 0).flatten().numpy()

    def import_slot(self, slot: int, stop: int, payload: NDArray[np.uint8]) -> None:
        """Write an exported context into a slot. Raises BrokenHandoff where its size is another."""
        if payload.nbytes != self.slot_bytes():
            raise BrokenHandoff(f"a draft context has {payload.nbytes} bytes, expected {self.slot_bytes()}")
        rows, _ = self._last(slot, stop, 0)
        data = torch.from_numpy(payload.copy())  # pyright: ignore[reportUnknownMemberType]
        self.rings_BF.view(torch.uint8)[:, rows] = data.view(len(self.rings_BF), self.window, -1)

    def _last(self, slot: int, stop: int, context_from: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(stop - self.window, stop)
        return slot * self.window + positions % self.window, positions >= max(context_from, 0)


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """Where the rows of a pass find their entries: one window for all R rows, and the R rows themselves."""

    context_ring: Tensor  # int64 [S * W], flat rows of a ring
    index: Tensor  # int64 [S * R, W + R], into nothing, then context, then the pass's own rows
    angles: Angles

    @classmethod
    def of(cls, anchors: Sequence[Anchor], rows: int, window: int, table: RotaryTable) -> "DraftPlan":
        slots_S1, positions_S1, froms_S1 = (
            torch.tensor([values], dtype=torch.int64).T
            for values in zip(*((a.slot, a.position, max(a.context_from, 0)) for a in anchors), strict=True)
        )
        count = len(anchors)
        reach_SW = positions_S1 - window + torch.arange(window)
        context_SW = 1 + torch.arange(count * window).view(count, window)
        context_SW.masked_fill_(reach_SW < froms_S1, 0)
        own_SR = 1 + count * window + torch.arange(count * rows).view(count, rows)
        index = torch.cat((context_SW, own_SR), 1).repeat_interleave(rows, 0)
        places = (positions_S1 + torch.arange(rows)).flatten()
        ring_SW = slots_S1 * window + reach_SW % window
        return cls(ring_SW.flatten(), index, table.angles(places))
