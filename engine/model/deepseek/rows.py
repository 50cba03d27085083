"""The rows of one step, and where their windows, groups and entries lie.

Shapes: T rows, S sequences, W window, G groups that a step completes, r ratio. Everything here is index
arithmetic over positions; nothing depends on a layer's values, so a step works it out once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """The next rows of one sequence: positions start .. start + count - 1, in order.

    Decoder layers see positions from `decoder_from` on (section 1.3); window attention reads none below
    `window_from`, and global entries below `write_from` are left as they are (section 1.4).
    engine.model.deepseek.replay works these three out.
    """

    slot: int  # of the cache's per-sequence state
    blocks: Sequence[int]  # of the cache's global entries, in order of position
    start: int
    count: int
    decoder_from: int = 0
    window_from: int = 0
    write_from: int = 0

    @property
    def stop(self) -> int:
        return self.start + self.count

    def trimmed(self) -> "SequenceRows | None":
        """Those of the rows that decoder layers see, their windows bounded likewise."""
        start = max(self.start, self.decoder_from)
        if start >= self.stop:
            return None
        bound = max(self.window_from, self.decoder_from)
        return replace(self, start=start, count=self.stop - start, window_from=bound)


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """Windows of `width` positions over a ring of rows a slot.

    Index 0 is nothing; then come `width` - 1 rows of history a sequence, then the step's own rows. Where
    `first` is 0 the index points into the ring itself, which has the step's rows already; -1 is nothing.
    """

    history_ring: Tensor  # int64 [S * (width - 1)], rows of the flat ring
    index: Tensor  # int64, oldest first
    stored_rows: Tensor  # int64, the step's rows that the ring keeps
    stored_ring: Tensor  # int64, and where
    first: int = 1

    @property
    def in_ring(self) -> bool:
        return self.first == 0

    def pool(self, ring: Tensor, new: Tensor, nothing: Tensor) -> Tensor:
        """[1 + history + T, ...]: what the index points into, where that is not the ring."""
        return torch.cat((nothing, ring[self.history_ring], new))

    def exchange(self, ring: Tensor, new: Tensor, nothing: Tensor) -> Tensor:
        """[..., W, X], the rows that the index names; the step's own are left in the ring."""
        if self.first:
            found = self.pool(ring, new, nothing)[self.index]
            ring[self.stored_ring] = new[self.stored_rows]
            return found
        ring[self.stored_ring] = new
        if not self.index.shape[0]:
            return ring[self.index]
        return torch.where((self.index < 0)[..., None], nothing[0], ring[self.index.clamp(min=0)])


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The groups of `ratio` positions that a step completes, in order of its rows (section 2.3)."""

    members: WindowPlan | None  # each group's positions, [G, w]; None at ratio 1, where a row is a group
    phases: Tensor  # int64 [T], where in its group each row stands
    last_rows: Tensor  # int64 [G], the row that completes each group
    first_positions: Tensor  # int64 [G], the group's position
    written: Tensor  # int64, which of the groups are written
    entries: Tensor  # int64, and to which entries


class Rows:
    """Some rows of a step with their index tensors. Immutable but for what it remembers."""

    def __init__(self, sequences: Sequence[SequenceRows], block_tokens: int) -> None:
        self.sequences = tuple(sequences)
        self.block_tokens = block_tokens
        counts = [s.count for s in self.sequences]
        self._count = sum(counts)
        self._starts_S = torch.tensor([s.start for s in self.sequences], dtype=torch.int64)
        self._counts_S = torch.tensor(counts, dtype=torch.int64)
        self._slots_S = torch.tensor([s.slot for s in self.sequences], dtype=torch.int64)
        self._bounds_S = torch.tensor([s.window_from for s in self.sequences], dtype=torch.int64)
        self.sequence_T = torch.arange(len(counts)).repeat_interleave(self._counts_S)
        self._visible: dict[tuple[int, int], Tensor] = {}
        self._offsets = [0, *accumulate(counts)][:-1]
        self._offsets_S = torch.tensor(self._offsets, dtype=torch.int64)
        self.positions_T = torch.arange(sum(counts)) + (self._starts_S - self._offsets_S)[self.sequence_T]
        width = max((len(s.blocks) for s in self.sequences), default=0)
        self._tables = torch.tensor(
            [[*s.blocks, *[0] * (width - len(s.blocks))] for s in self.sequences], dtype=torch.int64
        ).view(len(counts), width)

    def __len__(self) -> int:
        return self._count

    def row_slice(self, sequence: int) -> slice:
        """The rows of the sequence with that number."""
        start = self._offsets[sequence]
        return slice(start, start + self.sequences[sequence].count)

    def windows(self, width: int, ring_rows: int, *, bounded: bool = True) -> WindowPlan:
        """Windows of `width` positions; `bounded`: never below the sequence's `window_from`."""
        history = width - 1
        starts_S1 = self._starts_S[:, None]
        past_SH = (starts_S1 - history + torch.arange(history)).clamp_(min=0)
        history_ring = self._slots_S[:, None] * ring_rows + past_SH % ring_rows
        sequence_T1, start_T1 = self.sequence_T[:, None], self._starts_S[self.sequence_T, None]
        reach_TW = self.positions_T[:, None] - history + torch.arange(width)
        from_history = sequence_T1 * history + (reach_TW - start_T1) + history
        first_new = len(self.sequences) * history + self._offsets_S[self.sequence_T, None]
        index_TW = 1 + torch.where(reach_TW < start_T1, from_history, first_new + reach_TW - start_T1)
        bound = self._bounds_S[self.sequence_T, None] if bounded else 0
        index_TW.masked_fill_(reach_TW < bound, 0)
        stops_T = (self._starts_S + self._counts_S)[self.sequence_T]
        kept = (self.positions_T >= stops_T - ring_rows).nonzero()[:, 0]
        ring = self._slots_S[self.sequence_T[kept]] * ring_rows + self.positions_T[kept] % ring_rows
        return WindowPlan(history_ring.flatten(), index_TW, kept, ring)

    def windows_in_ring(self, width: int, ring_rows: int, picked: Tensor | None = None) -> WindowPlan:
        """`windows` for steps so short that the ring holds every row's window once it has the step's rows.

        `picked`: the rows whose windows are asked for, bounded by the sequence's first position alone.
        """
        assert all(s.count + width - 1 <= ring_rows for s in self.sequences)
        slots_T = (self._slots_S * ring_rows)[self.sequence_T]
        own_T = slots_T + self.positions_T % ring_rows
        rows = slice(None) if picked is None else picked
        reach_TW = self.positions_T[rows, None] + torch.arange(1 - width, 1)
        index_TW = slots_T[rows, None] + reach_TW % ring_rows
        bound = self._bounds_S[self.sequence_T, None] if picked is None else 0
        index_TW.masked_fill_(reach_TW < bound, -1)
        return WindowPlan(own_T[:0], index_TW, torch.arange(self._count), own_T, first=0)

    def groups(self, ratio: int, ring_rows: int, width: int | None = None) -> GroupPlan:
        """The groups of a ratio that these rows complete.

        `width`: the positions up to its last that make a group; the ratio, unless groups overlap.
        """
        phases = self.positions_T % ratio
        last_rows = (phases == ratio - 1).nonzero()[:, 0]
        first_positions = self.positions_T[last_rows] - (ratio - 1)
        least_S = torch.tensor([s.write_from for s in self.sequences], dtype=torch.int64)
        sequence_G = self.sequence_T[last_rows]
        written = (first_positions >= least_S[sequence_G]).nonzero()[:, 0]
        groups = torch.div(first_positions[written], ratio, rounding_mode="floor")
        entries = self.entries(sequence_G[written], groups, ratio)
        width = ratio if width is None else width
        members = None if width == 1 else self._members(width, ring_rows, last_rows)
        return GroupPlan(members, phases, last_rows, first_positions, written, entries)

    def _members(self, width: int, ring_rows: int, last_rows: Tensor) -> WindowPlan:
        if all(s.count + width - 1 <= ring_rows for s in self.sequences):
            return self.windows_in_ring(width, ring_rows, last_rows)
        plan = self.windows(width, ring_rows, bounded=False)
        return replace(plan, index=plan.index[last_rows])

    def entries(self, sequence: Tensor, groups: Tensor, ratio: int) -> Tensor:
        """Flat entry numbers of groups of sequences, elementwise."""
        size = self.block_tokens // ratio
        block = torch.div(groups, size, rounding_mode="floor")
        return self._tables[sequence, block] * size + groups % size

    def entries_of(self, groups_TK: Tensor, ratio: int) -> Tensor:
        """Flat entry numbers of groups of each row's sequence, [T, K]."""
        if len(self.sequences) == 1 and (0, ratio) in self._visible and self._visible[0, ratio].shape[0]:
            return self._visible[0, ratio][groups_TK]
        return self.entries(self.sequence_T[:, None].expand_as(groups_TK), groups_TK, ratio)

    def visible_entries(self, sequence: int, ratio: int) -> Tensor:
        """Entry numbers of all groups of a sequence that its last row sees, in order."""
        key = sequence, ratio
        if key not in self._visible:
            groups = torch.arange(self.sequences[sequence].stop // ratio)
            self._visible[key] = self.entries(torch.full_like(groups, sequence), groups, ratio)
        return self._visible[key]
