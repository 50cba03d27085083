"""From token windows to a pass's inputs: Engram's rows, and where a prompt is taken to end."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.model.deepseek.config import DeepseekConfig
from engine.model.deepseek.engram_hash import EngramHash
from engine.training.network import Batch
from engine.training.packing import Ids


@dataclass(frozen=True, slots=True)
class BatchMaker:
    """What depends on the vocabulary alone, worked out once."""

    config: DeepseekConfig
    compressed: Tensor  # int64 [V]
    hashes: dict[int, EngramHash]

    @classmethod
    def of(cls, config: DeepseekConfig, compressed: Tensor) -> "BatchMaker":
        hashes = dict(zip(config.engram_layer_ids, EngramHash.of(config), strict=True))
        return cls(config, compressed, hashes)

    def __call__(self, windows: Ids, noise: np.random.Generator | None = None) -> Batch:
        """Windows [B, T]. With noise, each sequence's prompt ends somewhere: decoder layers then replay."""
        ids = torch.tensor(windows, dtype=torch.int64)
        history = self._history(ids)
        rows = {layer: hashed.rows(history) for layer, hashed in self.hashes.items()}
        ends = None
        if noise is not None:
            least = self.config.sliding_window
            ends = torch.tensor(noise.integers(least, ids.shape[1] // 2 + 1, len(ids)))
        return Batch(ids, rows, ends)

    def _history(self, ids: Tensor) -> Tensor:
        """Compressed ids of each row and before it, the newest first, padding before the first: [N, A]."""
        reach = self.config.engram_max_ngram_size
        pad = self.compressed[self.config.engram_pad_token_id]
        known = self.compressed[ids]
        before = pad.expand(len(ids), reach - 1)
        padded = torch.cat((before, known), 1)
        return padded.unfold(1, reach, 1).flip(-1).reshape(-1, reach).contiguous()
