"""The KV of a llama model's sequences: keys and values of every layer, in blocks. Slots hold nothing."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.cache.kv_cache import KvCache
from engine.errors import BrokenHandoff
from engine.model.base import ChunkRows, Held
from kernels.operations import Rows
from protocol.handoff import KvPayload, StateLayout

if TYPE_CHECKING:
    from engine.model.llama import LlamaModel


class LlamaState:
    """A State."""

    dtype = "float32"
    stages = None

    def __init__(self, model: "LlamaModel", num_blocks: int, block_tokens: int) -> None:
        self._model = model
        self.cache = KvCache(model.cache_shape(num_blocks, block_tokens))

    def begin(self, slot: int, token_ids: Sequence[int]) -> None:
        """Nothing depends on the slot."""

    def run(self, chunks: Sequence[ChunkRows]) -> Tensor:
        ids: list[int] = []
        positions: list[int] = []
        owners: list[int] = []
        last_rows: list[int] = []
        for owner, chunk in enumerate(chunks):
            ids += chunk.token_ids
            positions += range(chunk.start, chunk.start + len(chunk.token_ids))
            owners += [owner] * len(chunk.token_ids)
            last_rows += range(len(ids) - chunk.num_logits, len(ids))
        tables = _tables([chunk.blocks for chunk in chunks])
        rows = Rows(torch.tensor(positions), torch.tensor(owners), tables)
        hidden = self._model.forward(torch.tensor(ids), rows, self.cache.data)
        return self._model.head(hidden[last_rows]) if last_rows else hidden[:0]

    def layout(self, held: Held) -> StateLayout:
        return self.cache.layout(held.num_positions)

    def export(self, held: Held) -> KvPayload:
        return self.cache.export(held.blocks, held.num_positions)

    def import_(self, held: Held, payload: KvPayload) -> None:
        self.cache.import_(payload, held.blocks, held.num_positions)

    @property
    def block_bytes(self) -> int:
        return self.cache.block_bytes

    def export_block(self, block: int) -> KvPayload:
        return self.cache.export([block], self.cache.block_tokens)

    def import_block(self, block: int, payload: KvPayload) -> None:
        if payload.nbytes != self.block_bytes:
            raise BrokenHandoff(f"a block has {payload.nbytes} bytes, this cache's takes {self.block_bytes}")
        self.cache.import_(payload, [block], self.cache.block_tokens)

    def copy_block(self, source: int, target: int) -> None:
        self.cache.data[:, target] = self.cache.data[:, source]

    def copy_slot(self, source: int, target: int) -> None:
        """Nothing depends on the slot."""

    def export_windows(self, slot: int, num_positions: int) -> KvPayload:
        return np.zeros(0, np.uint8)

    def import_windows(self, slot: int, num_positions: int, payload: KvPayload) -> None:
        """There are none."""


def _tables(blocks: list[Sequence[int]]) -> Tensor:
    width = max(len(row) for row in blocks)
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in blocks], dtype=torch.int32)
