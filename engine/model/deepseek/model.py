"""DeepSeek-V4.1's text model (sections 1 to 7).

Shapes: T rows, N streams, C channels, V vocabulary. It differs from the release in nothing but the type of
its arithmetic, float32 throughout; caches keep the released formats unless they are switched off.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine import numerics
from engine.model.deepseek.block import Block
from engine.model.deepseek.cache import DeepseekCache, bytes_per_token
from engine.model.deepseek.config import DeepseekConfig
from engine.model.deepseek.engram import EngramMemory
from engine.model.deepseek.hyper_connections import Stream
from engine.model.deepseek.norm import RmsNorm
from engine.model.deepseek.roles import layer_roles
from engine.model.deepseek.rope import RotaryTables
from engine.model.deepseek.rows import SequenceRows
from engine.model.deepseek.step import Observer, Step
from engine.model.tensor_source import TensorSource
from engine.numerics import Dense
from kernels.operations import Operations

_CHUNK = 512  # rows that `logits` runs at a time; more take more memory, and give the same bits


class DeepseekModel:
    """Weights and arithmetic; holds no state of a request. Not thread-safe. `close` ends its reading thread.

    Tensors of drafts and vision stay in the source: its owner takes them and ends the taking.
    """

    def __init__(
        self,
        config: DeepseekConfig,
        source: TensorSource,
        operations: Operations,
        compressed_ids: Tensor | None = None,
    ) -> None:
        """`compressed_ids`: of the tokenizer (`engram_hash.compress_ids`), where the model has Engram layers.

        Raises BrokenModelFile: a tensor missing or misshapen, or ids of another tokenizer.
        """
        self.config, self.operations = config, operations
        v, c = config.vocab_size, config.hidden_size
        self._embedding_VC = source.take("embed.weight", (v, c))
        self._head = Dense.of(source.take("head.weight", (v, c)))
        self._norm = RmsNorm.take(source, "norm", c, config.rms_norm_eps)
        self._engram = EngramMemory(config, source, compressed_ids)
        self._blocks = [
            Block(config, role, source, self._engram.layers.get(role.layer)) for role in layer_roles(config)
        ]
        self._tables = RotaryTables.of(config)

    def close(self) -> None:
        self._engram.close()

    def cache_bytes_per_token(self) -> float:
        """Bytes of persistent (global) KV a token: 890 for the release."""
        return bytes_per_token(self.config)

    def new_cache(self, num_blocks: int, block_tokens: int, num_slots: int) -> DeepseekCache:
        return DeepseekCache(self.config, num_blocks, block_tokens, num_slots)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        sequences: Sequence[SequenceRows],
        cache: DeepseekCache,
        observer: Observer | None = None,
    ) -> Tensor:
        """Run the rows of several sequences through all layers; hidden states [T, C], collapsed.

        token_ids int64 [T], sequence after sequence, each of another slot. Rows that decoder layers do not
        see (`SequenceRows.decoder_from`) come out as zeros. A row's bits depend on its sequence alone.
        """
        self._check(token_ids, sequences, cache)
        step = Step(self.operations, cache, self._tables, list(sequences), observer)
        lookups = self._engram.issue(step, token_ids)
        image_T = self._image_rows(token_ids)
        stream = Stream.of(self._embedding_VC[token_ids], self.config.hc_mult)
        for block in self._blocks:
            layer = block.role.layer
            if layer == cache.cut and image_T is not None and step.picked is not None:
                image_T = image_T[step.picked]
            stream = block(step, stream, image_T, lookups)
            if stream.x.shape[0] == 0:
                break
            if observer is not None:
                observer.left(layer, stream, step.view(layer).queries)
        if step.picked is None:
            return stream.collapse()
        hidden_TC = torch.zeros(len(token_ids), self.config.hidden_size)
        hidden_TC[step.picked] = stream.collapse()
        return hidden_TC

    @torch.inference_mode()
    def head(self, hidden_TC: Tensor) -> Tensor:
        """Logits [T, V] of hidden states."""
        normed = self._norm(self.operations, hidden_TC)
        return numerics.linear(self.operations, normed, (self._head,))[0]

    def logits(
        self, token_ids: Sequence[int], last_only: bool = False, observer: Observer | None = None
    ) -> Tensor:
        """One full exact forward without replay: [T, V] float32, or [V] of the last position."""
        block = _block_tokens(self.config)
        num_blocks = -(-len(token_ids) // block)
        cache, ids = self.new_cache(num_blocks, block, 1), torch.tensor(token_ids, dtype=torch.int64)
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

    def _image_rows(self, token_ids: Tensor) -> Tensor | None:
        if self.config.image_token_id is None:
            return None
        image_T = token_ids == self.config.image_token_id
        return image_T if bool(image_T.any()) else None

    def _check(self, token_ids: Tensor, sequences: Sequence[SequenceRows], cache: DeepseekCache) -> None:
        """Index arithmetic trusts these; the callers are ours."""
        assert len(token_ids) == sum(s.count for s in sequences) > 0
        assert len({s.slot for s in sequences}) == len(sequences), "a slot occurs twice in a step"
        for s in sequences:
            assert s.count > 0
            assert 0 <= s.slot < cache.num_slots
            assert s.stop <= self.config.max_position_embeddings, "past the last position"
            assert s.stop <= len(s.blocks) * cache.block_tokens, "blocks are missing"


def _block_tokens(config: DeepseekConfig) -> int:
    block = 64
    for layer in config.kv_source_layer_ids:
        ratio = config.ratio(layer)
        block = block if block % ratio == 0 else block * ratio
    return block
