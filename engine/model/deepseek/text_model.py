"""What V4.1's and V4's text models do alike around their layers: whole prompts, and checks of a step.

Shapes: T rows, C channels, V vocabulary.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.model.base import check_prompt
from engine.model.deepseek.cache import SequenceCache
from engine.model.deepseek.rows import SequenceRows
from engine.model.deepseek.shape import TextShape
from engine.model.deepseek.step import Observer
from engine.model.stages import StageClock
from kernels.operations import Operations

_BLOCK = 64
_CHUNK = 512  # rows that `logits` runs at a time; more take more memory, and give the same bits


class TextModel(ABC):
    """Weights and arithmetic; holds no state of a request. Not thread-safe."""

    operations: Operations
    has_encoder = False  # whether decoder layers may leave rows out (section 1.3)

    @property
    @abstractmethod
    def shape(self) -> TextShape: ...

    @abstractmethod
    def cache_bytes_per_token(self) -> float: ...

    @abstractmethod
    def new_cache(self, num_blocks: int, block_tokens: int, num_slots: int) -> SequenceCache: ...

    @abstractmethod
    def forward(
        self,
        token_ids: Tensor,
        sequences: Sequence[SequenceRows],
        cache: SequenceCache,
        observer: Observer | None = None,
        *,
        clock: StageClock | None = None,
    ) -> Tensor:
        """Run the rows of several sequences through all layers; hidden states [T, C], collapsed.

        `clock` is told of the stages that a model has.
        """

    @abstractmethod
    def head(self, hidden_TC: Tensor) -> Tensor:
        """Logits [T, V] of hidden states."""

    @property
    def identity(self) -> str:
        """What decides results beside weights, config and numerics."""
        return ""

    @property
    def interruptible(self) -> bool:
        """Whether a step may end between two stages."""
        return False

    @property
    def block_tokens(self) -> int:
        """Tokens of a cache block for a caller who has no reason for another: every ratio divides them."""
        return math.lcm(_BLOCK, *self.entry_ratios)

    @property
    def entry_ratios(self) -> frozenset[int]:
        """Tokens of an entry, of each kind of layer that keeps such."""
        return frozenset(filter(None, map(self.shape.ratio, range(self.shape.num_hidden_layers))))

    def close(self) -> None:
        """Ends what threads it has."""
        return

    def logits(
        self, token_ids: Sequence[int], last_only: bool = False, observer: Observer | None = None
    ) -> Tensor:
        """One full exact forward without replay: [T, V] float32, or [V] of the last position."""
        check_prompt(token_ids, self.shape.vocab_size, self.shape.max_position_embeddings)
        num_blocks = -(-len(token_ids) // self.block_tokens)
        cache = self.new_cache(num_blocks, self.block_tokens, 1)
        ids = torch.tensor(token_ids, dtype=torch.int64)
        parts: list[Tensor] = []
        for start in range(0, len(ids), _CHUNK):
            chunk = ids[start : start + _CHUNK]
            rows = SequenceRows(0, range(num_blocks), start, len(chunk))
            hidden_TC = self.forward(chunk, [rows], cache, observer)
            if not last_only:
                parts.append(self.head(hidden_TC))
            elif start + _CHUNK >= len(ids):
                parts.append(self.head(hidden_TC[-1:]))
        return parts[-1][0] if last_only else torch.cat(parts)

    def _check(self, token_ids: Tensor, sequences: Sequence[SequenceRows], cache: SequenceCache) -> None:
        """Index arithmetic trusts these; the callers are ours."""
        assert len(token_ids) == sum(s.count for s in sequences) > 0
        assert len({s.slot for s in sequences}) == len(sequences), "a slot occurs twice in a step"
        for s in sequences:
            assert s.count > 0
            assert 0 <= s.slot < cache.num_slots
            assert s.stop <= self.shape.max_position_embeddings, "past the last position"
            assert s.stop <= len(s.blocks) * cache.block_tokens, "blocks are missing"
