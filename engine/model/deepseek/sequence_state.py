"""One sequence's state as contiguous bytes, and back: for hand-offs, tiers and preemption to memory.

In order: main entries and index keys of each kv source, its open group, the last window of each layer, the
last token ids. Rows that the model would not read are zeros, so that equal states are equal bytes.
"""

from collections.abc import Iterable, Iterator, Sequence
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
class WindowSpan:
    """What goes on from `num_positions` beside the blocks: windows of `num_layers`, open groups, last ids."""

    slot: int
    num_positions: int
    num_layers: int


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
    return _gather(_parts(cache, span))


def import_state(cache: SequenceCache, span: StateSpan, payload: NDArray[np.uint8]) -> None:
    """Write an exported state into a slot and blocks, of any number. The payload may be read-only.

    Raises BrokenHandoff where it has another size than the layout.
    """
    _scatter(list(_parts(cache, span)), payload)


def export_windows(cache: SequenceCache, span: WindowSpan) -> NDArray[np.uint8]:
    """A copy of a slot's windows, open groups and last ids. Equal rows before it leave equal bytes."""
    return _gather(_slot_parts(cache, span))


def import_windows(cache: SequenceCache, span: WindowSpan, payload: NDArray[np.uint8]) -> None:
    """Write them into a slot. Raises BrokenHandoff where the payload has another size."""
    _scatter(list(_slot_parts(cache, span)), payload)


def export_block(cache: SequenceCache, block: int) -> NDArray[np.uint8]:
    """A copy of one block's global entries, source by source."""
    return torch.cat([rows.flatten() for rows in _block_rows(cache, block)]).numpy()


def import_block(cache: SequenceCache, block: int, payload: NDArray[np.uint8]) -> None:
    """Write them into a block of any number. Raises BrokenHandoff where the payload has another size."""
    parts = _block_rows(cache, block)
    _check_size(payload, sum(rows.numel() for rows in parts))
    data, start = torch.from_numpy(payload.copy()), 0  # pyright: ignore[reportUnknownMemberType]
    for rows in parts:
        rows.copy_(data[start : start + rows.numel()].view(rows.shape))
        start += rows.numel()


def copy_block(cache: SequenceCache, source: int, target: int) -> None:
    for old, new in zip(_block_rows(cache, source), _block_rows(cache, target), strict=True):
        new.copy_(old)


def copy_slot(cache: SequenceCache, source: int, target: int) -> None:
    """All that a slot has, rollback rows included."""
    for ring, size in _rings(cache):
        ring[target * size : (target + 1) * size] = ring[source * size : (source + 1) * size]


def save_slot(cache: SequenceCache, slot: int) -> list[Tensor]:
    """A copy of all that a slot has, for `restore_slot`."""
    return [ring[slot * size : (slot + 1) * size].clone() for ring, size in _rings(cache)]


def restore_slot(cache: SequenceCache, slot: int, saved: Sequence[Tensor]) -> None:
    for (ring, size), rows in zip(_rings(cache), saved, strict=True):
        ring[slot * size : (slot + 1) * size] = rows


def _rings(cache: SequenceCache) -> list[tuple[Tensor, int]]:
    """What belongs to slots: flat rows, and how many of them a slot has."""
    rings = [(ring, cache.window_rows) for ring in cache.window_LF]
    rings += [
        (entries.open, cache.open_rows(entries.shape.width))
        for entries in cache.sources.values()
        if entries.open is not None
    ]
    rings.append((cache.lookback_F, cache.lookback_rows))
    return rings


def block_bytes(cache: SequenceCache) -> int:
    """Of one block's global entries."""
    total = 0
    for source in cache.sources.values():
        read = [source.main, *([source.index] if source.shape.indexed else ())]
        entry = sum(rows.shape[1] * rows.element_size() for rows in read)
        total += cache.block_tokens // source.ratio * entry
    return total


def _gather(parts: Iterable[_Part]) -> NDArray[np.uint8]:
    pieces: list[Tensor] = []
    for part in parts:
        piece = part.memory[part.rows.clamp(min=0)] if len(part.memory) else part.memory
        pieces.append(piece.masked_fill_((part.rows < 0)[:, None], 0).flatten())
    return torch.cat(pieces).numpy()


def _scatter(parts: Sequence[_Part], payload: NDArray[np.uint8]) -> None:
    _check_size(payload, sum(len(part.rows) * part.memory.shape[1] for part in parts))
    data, start = torch.from_numpy(payload.copy()), 0  # pyright: ignore[reportUnknownMemberType]
    for part in parts:
        stop = start + len(part.rows) * part.memory.shape[1]
        present = part.rows >= 0
        part.memory[part.rows[present]] = data[start:stop].view(len(part.rows), part.memory.shape[1])[present]
        start = stop


def _check_size(payload: NDArray[np.uint8], expected: int) -> None:
    if payload.nbytes != expected:
        raise BrokenHandoff(f"a state has {payload.nbytes} bytes, this cache's layout takes {expected}")


def _block_rows(cache: SequenceCache, block: int) -> list[Tensor]:
    """Views uint8 of a block's entries."""
    found: list[Tensor] = []
    for source in cache.sources.values():
        size = cache.block_tokens // source.ratio
        rows = slice(block * size, (block + 1) * size)
        found.append(source.main[rows].view(torch.uint8))
        if source.shape.indexed:
            found.append(source.index[rows].view(torch.uint8))
    return found


def _parts(cache: SequenceCache, span: StateSpan) -> Iterator[_Part]:
    stop = span.num_positions
    tables = torch.tensor(list(span.blocks), dtype=torch.int64)
    for layer, source in cache.sources.items():
        groups, size = torch.arange(stop // source.ratio), cache.block_tokens // source.ratio
        entries = tables[torch.div(groups, size, rounding_mode="floor")] * size + groups % size
        yield _Part(f"main.{layer}", source.main.view(torch.uint8), entries)
        if source.shape.indexed:
            yield _Part(f"index.{layer}", source.index.view(torch.uint8), entries)
        if source.open is not None:
            yield _open_part(cache, layer, source.open, span.slot, stop)
    for layer in range(len(cache.window_LF)):
        bound = max(span.window_from, span.decoder_from if layer > cache.cut else 0)
        yield _window_part(cache, layer, span.slot, stop, bound)
    yield _lookback_part(cache, span.slot, stop)


def _slot_parts(cache: SequenceCache, span: WindowSpan) -> Iterator[_Part]:
    stop = span.num_positions
    for layer, source in cache.sources.items():
        if source.open is not None:
            yield _open_part(cache, layer, source.open, span.slot, stop)
    for layer in range(span.num_layers):
        yield _window_part(cache, layer, span.slot, stop, 0)
    yield _lookback_part(cache, span.slot, stop)


def _open_part(cache: SequenceCache, layer: int, memory: Tensor, slot: int, stop: int) -> _Part:
    """Single tokens of the group that is not full, and those before it that overlapping groups read again."""
    shape = cache.sources[layer].shape
    first = stop // shape.ratio * shape.ratio
    positions = torch.arange(first - (shape.width - shape.ratio), first + shape.ratio - 1)
    present = (positions >= 0) & (positions < stop)
    rows = _ring(slot, cache.open_rows(shape.width), positions, present)
    return _Part(f"open.{layer}", memory.view(torch.uint8), rows)


def _window_part(cache: SequenceCache, layer: int, slot: int, stop: int, bound: int) -> _Part:
    last = torch.arange(stop - cache.config.sliding_window, stop)
    rows = _ring(slot, cache.window_rows, last, last >= bound)
    return _Part(f"window.{layer}", cache.window_LF[layer].view(torch.uint8), rows)


def _lookback_part(cache: SequenceCache, slot: int, stop: int) -> _Part:
    last = torch.arange(stop - max(cache.config.engram_max_ngram_size, 1) + 1, stop)
    rows = _ring(slot, cache.lookback_rows, last, last >= 0)
    return _Part("lookback", cache.lookback_F[:, None].view(torch.uint8), rows)


def _ring(slot: int, size: int, positions: Tensor, present: Tensor) -> Tensor:
    return torch.where(present, slot * size + positions % size, -1)
