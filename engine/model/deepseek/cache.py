"""What a sequence leaves behind: global entries in paged blocks, and bounded state in a slot (section 3).

Global entries (main and index keys of each kv source) are addressed by block tables: a block holds
`block_tokens` positions and so block_tokens / ratio entries of a source. The window of every layer, the open
group of each compressor and the last token ids belong to a slot. A slot's rings keep some rows more than the
model reads, so that rejected drafts can be rolled back by writing over them.
Shapes: L layers, F flat rows (blocks or slots times their rows).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import InvalidRequest
from engine.model.deepseek.config import DeepseekConfig
from engine.model.deepseek.records import Record, Records
from engine.model.deepseek.roles import cut_layer

ROLLBACK_ROWS = 8  # rows a slot keeps beyond what the model reads


@dataclass(frozen=True, slots=True)
class SourceEntries:
    """The global cache of one kv source; `open_F` is None at ratio 1, where no group stays open."""

    ratio: int
    main: Tensor
    index: Tensor
    open: Tensor | None  # float32 [slots * open rows, 2 * D]: values and gates of single tokens


class DeepseekCache:
    """Tensors only: who owns which block and slot is the caller's. Pages are touched when they are used."""

    def __init__(self, config: DeepseekConfig, num_blocks: int, block_tokens: int, num_slots: int) -> None:
        ratios = {config.ratio(layer) for layer in config.kv_source_layer_ids}
        if any(block_tokens % ratio for ratio in ratios):
            raise InvalidRequest(
                f"block_tokens is {block_tokens}, expected a multiple of the ratios {sorted(ratios)}",
                parameter="block_tokens",
            )
        self.config, self.records = config, Records.of(config)
        self.num_blocks, self.block_tokens, self.num_slots = num_blocks, block_tokens, num_slots
        self.cut = cut_layer(config)
        self.window_rows = config.sliding_window + ROLLBACK_ROWS
        self.lookback_rows = max(config.engram_max_ngram_size, 1) - 1 + ROLLBACK_ROWS
        self.window_LF = _rows_of(self.records.window, num_slots * self.window_rows, config.num_hidden_layers)
        self.sources = {layer: self._source(layer) for layer in config.kv_source_layer_ids}
        self.lookback_F = torch.zeros(num_slots * self.lookback_rows, dtype=torch.int64)

    def open_rows(self, ratio: int) -> int:
        """Rows of a slot's ring of single tokens' values and gates."""
        return ratio - 1 + ROLLBACK_ROWS

    def seed_lookback(self, slot: int, token_ids: Sequence[int]) -> None:
        """Tell a slot the ids before the next row: of a sequence that starts behind a cached prefix."""
        for position in range(max(len(token_ids) - self.lookback_rows, 0), len(token_ids)):
            ring = slot * self.lookback_rows + position % self.lookback_rows
            self.lookback_F[ring] = token_ids[position]

    def _source(self, layer: int) -> SourceEntries:
        ratio = self.config.ratio(layer)
        count = self.num_blocks * (self.block_tokens // ratio)
        open_rows = None
        if ratio > 1:
            open_rows = torch.zeros(self.num_slots * self.open_rows(ratio), 2 * self.config.head_dim)
        main, index = _rows_of(self.records.main, count), _rows_of(self.records.index, count)
        return SourceEntries(ratio, main, index, open_rows)


def bytes_per_token(config: DeepseekConfig) -> float:
    """Of global entries: 890 for the release (section 3)."""
    records = Records.of(config)
    entry = _record_bytes(records.main) + _record_bytes(records.index)
    return sum(entry / config.ratio(layer) for layer in config.kv_source_layer_ids)


def bytes_per_slot(config: DeepseekConfig) -> int:
    """Of the bounded state of one sequence."""
    cache = DeepseekCache(config, 0, 1 if not config.kv_source_layer_ids else _least_block(config), 1)
    state = [cache.window_LF, cache.lookback_F]
    state += [entries.open for entries in cache.sources.values() if entries.open is not None]
    return sum(tensor.numel() * tensor.element_size() for tensor in state)


def _least_block(config: DeepseekConfig) -> int:
    block = 1
    for layer in config.kv_source_layer_ids:
        block *= config.ratio(layer)
    return block


def _record_bytes(record: Record) -> int:
    return record.width * record.dtype.itemsize


def _rows_of(record: Record, count: int, layers: int | None = None) -> Tensor:
    """Zeros, so that what was never written decodes to a number."""
    shape = (count, record.width) if layers is None else (layers, count, record.width)
    return torch.zeros(shape, dtype=record.dtype)
