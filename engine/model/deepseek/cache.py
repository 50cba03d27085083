"""What a sequence leaves behind: global entries in paged blocks, and bounded state in a slot (section 3).

Global entries (main and index keys of each kv source) are addressed by block tables: a block holds
`block_tokens` positions and so block_tokens / ratio entries of a source. The window of every layer, the open
group of each compressor and the last token ids belong to a slot. A slot's rings keep some rows more than the
model reads, so that rejected drafts can be rolled back by writing over them.
Shapes: L layers, F flat rows (blocks or slots times their rows).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import InvalidRequest
from engine.model.deepseek.config import DeepseekConfig
from engine.model.deepseek.records import Record, Records
from engine.model.deepseek.roles import cut_layer
from engine.model.deepseek.shape import TextShape

ROLLBACK_ROWS = 8  # rows a slot keeps beyond what the model reads


@dataclass(frozen=True, slots=True)
class SourceShape:
    """What a kv source keeps. `width`: positions that make an entry, more than `ratio` where they overlap."""

    ratio: int
    width: int
    open_channels: int  # values and gates of a single token
    indexed: bool = True


@dataclass(frozen=True, slots=True)
class SourceEntries:
    """The global cache of one kv source; `open` is None where every token is an entry by itself."""

    shape: SourceShape
    main: Tensor
    index: Tensor  # of no rows where no indexer reads it
    open: Tensor | None  # float32 [slots * open rows, open channels]: values and gates of single tokens

    @property
    def ratio(self) -> int:
        return self.shape.ratio


class SequenceCache:
    """Tensors only: who owns which block and slot is the caller's. Pages are touched when they are used.

    `cut`: the decoder's first layer (section 1.2), or the number of layers.
    """

    def __init__(
        self,
        config: TextShape,
        records: Records,
        sources: Mapping[int, SourceShape],
        cut: int,
        *,
        num_blocks: int,
        block_tokens: int,
        num_slots: int,
        num_window_layers: int | None = None,
    ) -> None:
        ratios = {source.ratio for source in sources.values()}
        if any(block_tokens % ratio for ratio in ratios):
            raise InvalidRequest(
                f"block_tokens is {block_tokens}, expected a multiple of the ratios {sorted(ratios)}",
                parameter="block_tokens",
            )
        self.config, self.records, self.cut = config, records, cut
        self.num_blocks, self.block_tokens, self.num_slots = num_blocks, block_tokens, num_slots
        self.window_rows = config.sliding_window + ROLLBACK_ROWS
        self.lookback_rows = max(config.engram_max_ngram_size, 1) - 1 + ROLLBACK_ROWS
        windows = config.num_hidden_layers if num_window_layers is None else num_window_layers
        self.window_LF = _rows_of(self.records.window, num_slots * self.window_rows, windows)
        self.sources = {layer: self._source(shape) for layer, shape in sources.items()}
        self.lookback_F = torch.zeros(num_slots * self.lookback_rows, dtype=torch.int64)

    def open_rows(self, width: int) -> int:
        """Rows of a slot's ring of single tokens' values and gates, where `width` of them make an entry."""
        return width - 1 + ROLLBACK_ROWS

    def seed_lookback(self, slot: int, token_ids: Sequence[int]) -> None:
        """Tell a slot the ids before the next row: of a sequence that starts behind a cached prefix."""
        for position in range(max(len(token_ids) - self.lookback_rows, 0), len(token_ids)):
            ring = slot * self.lookback_rows + position % self.lookback_rows
            self.lookback_F[ring] = token_ids[position]

    def _source(self, shape: SourceShape) -> SourceEntries:
        count = self.num_blocks * (self.block_tokens // shape.ratio)
        open_rows = None
        if shape.width > 1:
            open_rows = torch.zeros(self.num_slots * self.open_rows(shape.width), shape.open_channels)
        main = _rows_of(self.records.main, count)
        index = _rows_of(self.records.index, count if shape.indexed else 0)
        return SourceEntries(shape, main, index, open_rows)

    def slot_bytes(self) -> int:
        """Of the bounded state of all slots."""
        state = [self.window_LF, self.lookback_F]
        state += [entries.open for entries in self.sources.values() if entries.open is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in state)


class DeepseekCache(SequenceCache):
    """V4.1's: every kv source has index keys, and groups do not overlap."""

    def __init__(self, config: DeepseekConfig, num_blocks: int, block_tokens: int, num_slots: int) -> None:
        ratios = {layer: config.ratio(layer) for layer in config.kv_source_layer_ids}
        super().__init__(
            config,
            Records.of(config),
            {layer: SourceShape(ratio, ratio, 2 * config.head_dim) for layer, ratio in ratios.items()},
            cut_layer(config),
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            num_slots=num_slots,
        )


def bytes_per_token(config: DeepseekConfig) -> float:
    """Of global entries: 890 for the release (section 3)."""
    records = Records.of(config)
    entry = record_bytes(records.main) + record_bytes(records.index)
    return sum(entry / config.ratio(layer) for layer in config.kv_source_layer_ids)


def bytes_per_slot(config: DeepseekConfig) -> int:
    """Of the bounded state of one sequence."""
    block = 1 if not config.kv_source_layer_ids else _least_block(config)
    return DeepseekCache(config, 0, block, 1).slot_bytes()


def _least_block(config: DeepseekConfig) -> int:
    block = 1
    for layer in config.kv_source_layer_ids:
        block *= config.ratio(layer)
    return block


def record_bytes(record: Record) -> int:
    """Of one entry."""
    return record.width * record.dtype.itemsize


def _rows_of(record: Record, count: int, layers: int | None = None) -> Tensor:
    """Zeros, so that what was never written decodes to a number."""
    shape = (count, record.width) if layers is None else (layers, count, record.width)
    return torch.zeros(shape, dtype=record.dtype)
