"""One sequence's state as contiguous bytes, and back: for hand-offs, tiers and preemption to memory.

In order: main entries and index keys of each kv source, its open group, the last window of each layer, the
last token ids. Rows that the model would not read are zeros, so that equal states are equal bytes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.errors import BrokenHandoff
from engine.model.deepseek.cache import SequenceCache

Layout = tuple[tuple[str, int, int], ...]  # of each part: name, rows, bytes a row


@dataclass(frozen=True, slots=True)
class StateSpan:
    """Which state: the first `num_positions` of a sequence, whose bounds are those of its rows."""

    slot: int
    blocks: Sequence[int]
    num_positions: int
    decoder_from: int = 0
    window_from: int = 0


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    memory: Tensor  # uint8 [flat rows, bytes a row], shared with the cache
    rows: Tensor  # int64, flat rows in order of position; -1 where there is nothing


def layout(cache: SequenceCache, span: StateSpan) -> Layout:
    """Names and sizes of the parts: equal for every cache of one config and one number of positions."""
    return tuple((p.name, len(p.rows), p.memory.shape[1]) for p in _parts(cache, span))


def export_state(cache: SequenceCache, span: StateSpan) -> NDArray[np.uint8]:
    """A copy of a sequence's state, in the order of `layout`."""
    pieces: list[Tensor] = []
    for part in _parts(cache, span):
        piece = part.memory[part.rows.clamp(min=0)] if len(part.memory) else part.memory
        pieces.append(piece.masked_fill_((part.rows < 0)[:, None], 0).flatten())
    return torch.cat(pieces).numpy()


def import_state(cache: SequenceCache, span: StateSpan, payload: NDArray[np.uint8]) -> None:
    """Write an exported state into a slot and blocks, of any number. The payload may be read-only.

    Raises BrokenHandoff where it has another size than the layout.
    """
    parts = list(_parts(cache, span))
    expected = sum(len(part.rows) * part.memory.shape[1] for part in parts)
    if payload.nbytes != expected:
        raise BrokenHandoff(f"a state has {payload.nbytes} bytes, this cache's layout takes {expected}")
    data, start = torch.from_numpy(payload.copy()), 0  # pyright: ignore[reportUnknownMemberType]
    for part in parts:
        stop = start + len(part.rows) * part.memory.shape[1]
        present = part.rows >= 0
        part.memory[part.rows[present]] = data[start:stop].view(len(part.rows), part.memory.shape[1])[present]
        start = stop


def _parts(cache: SequenceCache, span: StateSpan) -> Iterator[_Part]:
    config, stop = cache.config, span.num_positions
    tables = torch.tensor(list(span.blocks), dtype=torch.int64)
    for layer, source in cache.sources.items():
        groups, size = torch.arange(stop // source.ratio), cache.block_tokens // source.ratio
        entries = tables[torch.div(groups, size, rounding_mode="floor")] * size + groups % size
        yield _Part(f"main.{layer}", source.main.view(torch.uint8), entries)
        if source.shape.indexed:
            yield _Part(f"index.{layer}", source.index.view(torch.uint8), entries)
        if source.open is not None:
            first = stop // source.ratio * source.ratio
            before = first - (source.shape.width - source.ratio)  # what overlapping groups read again
            positions = torch.arange(before, first + source.ratio - 1)
            present = (positions >= 0) & (positions < stop)
            rows = _ring(span.slot, cache.open_rows(source.shape.width), positions, present)
            yield _Part(f"open.{layer}", source.open.view(torch.uint8), rows)
    last = torch.arange(stop - config.sliding_window, stop)
    for layer in range(len(cache.window_LF)):
        bound = max(span.window_from, span.decoder_from if layer > cache.cut else 0)
        rows = _ring(span.slot, cache.window_rows, last, last >= bound)
        yield _Part(f"window.{layer}", cache.window_LF[layer].view(torch.uint8), rows)
    last = torch.arange(stop - max(config.engram_max_ngram_size, 1) + 1, stop)
    rows = _ring(span.slot, cache.lookback_rows, last, last >= 0)
    yield _Part("lookback", cache.lookback_F[:, None].view(torch.uint8), rows)


def _ring(slot: int, size: int, positions: Tensor, present: Tensor) -> Tensor:
    return torch.where(present, slot * size + positions % size, -1)
