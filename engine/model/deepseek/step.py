"""One forward step: its rows as each part of the stack sees them, and what layers hand to later layers."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.model.deepseek.cache import ROLLBACK_ROWS, SequenceCache
from engine.model.deepseek.core_attention import Entries, reads_caches
from engine.model.deepseek.hyper_connections import Stream
from engine.model.deepseek.rope import Angles, RotaryTables
from engine.model.deepseek.rows import GroupPlan, Rows, SequenceRows, WindowPlan
from engine.model.stages import Stage, StageClock
from kernels.operations import Operations


class Observer(Protocol):
    """Sees a step from inside: for drafts, whose context is the streams of certain layers, and for tests.

    Called in the model's thread; what it is given is not to be changed.
    """

    def left(self, layer: int, stream: Stream, rows: Rows) -> None:
        """A layer has run on these rows."""
        ...

    def selected(self, layer: int, groups_TK: Tensor, blocks: dict[int, Tensor], rows: Rows) -> None:
        """An index source has chosen groups, -1 for none; with the candidate blocks by slot that it makes."""
        ...


@dataclass(frozen=True, slots=True)
class View:
    """What a layer makes: keys for `rows`, outputs for `queries`, which are `rows[picked]` or all of them."""

    rows: Rows
    windows: WindowPlan
    queries: Rows
    picked: Tensor | None
    index: Tensor  # the queries' windows, into the pool of `windows`


@dataclass(frozen=True, slots=True)
class Selection:
    """The compressed entries that an index source chose, for its own layer and those that reuse them."""

    groups: Tensor  # int64, ascending, -1 for none
    entries: Entries


class KeyRows(NamedTuple):
    """Index keys of a sequence's groups in order: rows of a pool."""

    pool: Tensor
    rows: Tensor  # int64 [N]


@dataclass(slots=True)
class Shared:
    """What a layer leaves for later layers of the same step."""

    selection: Selection | None = None
    candidates: dict[int, Tensor] = field(
        default_factory=dict[int, Tensor]
    )  # by slot; absent: no restriction
    index_keys: dict[int, KeyRows] = field(
        default_factory=dict[int, KeyRows]
    )  # by slot, of the newest kv source


class Step:
    """The plans of one step over one cache. Encoder, cut and decoder layers see it through `view`."""

    def __init__(
        self,
        operations: Operations,
        cache: SequenceCache,
        tables: RotaryTables,
        sequences: list[SequenceRows],
        observer: Observer | None,
        *,
        clock: StageClock | None = None,
    ) -> None:
        self.operations, self.cache, self.observer = operations, cache, observer
        self._clock = clock
        self.shared = Shared()
        self._tables = tables
        self._angles: dict[tuple[int, bool], Angles] = {}
        self._groups: dict[tuple[int, int], GroupPlan] = {}
        self._group_angles: dict[tuple[int, int], Angles] = {}
        self.rows = Rows(sequences, cache.block_tokens)
        self.kept, self.picked = self._trim(sequences)
        self._encoder = self._whole(self.rows)
        self._decoder: View | None = None

    def passed(self, stage: Stage) -> None:
        """Raises StageInterrupted where somebody asked for it."""
        if self._clock is not None:
            self._clock.passed(stage)

    def view(self, layer: int) -> View:
        """How a layer sees the step (section 1.3): the cut layer makes keys of all rows for the kept ones."""
        if layer < self.cache.cut:
            return self._encoder
        if layer == self.cache.cut:
            index = self._encoder.windows.index
            index = index if self.picked is None else index[self.picked]
            return View(self.rows, self._encoder.windows, self.kept, self.picked, index)
        if self._decoder is None:
            self._decoder = self._encoder if self.kept is self.rows else self._whole(self.kept)
        return self._decoder

    def angles(self, rows: Rows, ratio: int) -> Angles:
        """Of the rows' positions, in the table of a ratio."""
        key = (ratio and 1, rows is self.kept)
        if key not in self._angles:
            self._angles[key] = self._tables.table(ratio).angles(rows.positions_T)
        return self._angles[key]

    def groups(self, ratio: int, width: int | None = None) -> GroupPlan:
        """The groups that the step's rows complete."""
        key = ratio, ratio if width is None else width
        if key not in self._groups:
            self._groups[key] = self.rows.groups(ratio, self.cache.open_rows(key[1]), key[1])
        return self._groups[key]

    def group_angles(self, ratio: int, width: int | None = None) -> Angles:
        """Of their first positions."""
        key = ratio, ratio if width is None else width
        if key not in self._group_angles:
            positions = self.groups(ratio, width).first_positions
            self._group_angles[key] = self._tables.table(ratio).angles(positions)
        return self._group_angles[key]

    def _whole(self, rows: Rows) -> View:
        width, ring_rows = self.cache.config.sliding_window, self.cache.window_rows
        direct = reads_caches(self.operations, self.cache.records.window)
        if direct and all(s.count <= ROLLBACK_ROWS for s in rows.sequences):
            windows = rows.windows_in_ring(width, ring_rows)
        else:
            windows = rows.windows(width, ring_rows)
        return View(rows, windows, rows, None, windows.index)

    def _trim(self, sequences: list[SequenceRows]) -> tuple[Rows, Tensor | None]:
        """The decoder's rows, and which of the step's they are; None for all of them."""
        reach = self.cache.config.sliding_window - 1
        if all(s.decoder_from <= max(s.start - reach, s.window_from) for s in sequences):
            return self.rows, None
        kept = [t for t in (s.trimmed() for s in sequences) if t is not None]
        rows = Rows(kept, self.cache.block_tokens)
        if len(rows) == len(self.rows):
            return rows, None
        froms = torch.tensor([s.decoder_from for s in sequences])[self.rows.sequence_T]
        return rows, (self.rows.positions_T >= froms).nonzero()[:, 0]
