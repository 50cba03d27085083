"""DeepSeek-V4.1's text model (sections 1 to 7).

Shapes: T rows, N streams, C channels, V vocabulary. It differs from the release in nothing but the type of
its arithmetic, float32 throughout; caches keep the released formats unless they are switched off.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine import numerics
from engine.model.deepseek.block import Block
from engine.model.deepseek.cache import DeepseekCache, SequenceCache, bytes_per_token
from engine.model.deepseek.config import DeepseekConfig
from engine.model.deepseek.engram import EngramMemory
from engine.model.deepseek.hyper_connections import Stream
from engine.model.deepseek.image_span import ImageRows
from engine.model.deepseek.norm import RmsNorm
from engine.model.deepseek.roles import layer_roles
from engine.model.deepseek.rope import RotaryTables
from engine.model.deepseek.rows import SequenceRows
from engine.model.deepseek.step import Observer, Step
from engine.model.deepseek.text_model import TextModel
from engine.model.tensor_source import TensorSource
from engine.numerics import Dense
from kernels.operations import Operations


class DeepseekModel(TextModel):
    """Weights and arithmetic; holds no state of a request. Not thread-safe. `close` ends its reading thread.

    Tensors of drafts and vision stay in the source: its owner takes them and ends the taking.
    """

    has_encoder = True

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
        self._engram = EngramMemory(config, source, operations, compressed_ids)
        self._blocks = [
            Block(config, role, source, operations, self._engram.layers.get(role.layer))
            for role in layer_roles(config)
        ]
        self._tables = RotaryTables.of(config)

    @property
    def shape(self) -> DeepseekConfig:
        return self.config

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
        cache: SequenceCache,
        observer: Observer | None = None,
        images: ImageRows | None = None,
    ) -> Tensor:
        """Run the rows of several sequences through all layers; hidden states [T, C], collapsed.

        token_ids int64 [T], sequence after sequence, each of another slot; rows of `images` carry the image
        token. Rows that decoder layers do not see (`SequenceRows.decoder_from`) come out as zeros. A row's
        bits depend on its sequence alone.
        """
        self._check(token_ids, sequences, cache)
        step = Step(self.operations, cache, self._tables, list(sequences), observer)
        lookups = self._engram.issue(step, token_ids)
        image_T = self._image_rows(token_ids)
        stream = Stream.of(self.embed(token_ids, images), self.config.hc_mult)
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

    def embed(self, token_ids: Tensor, images: ImageRows | None = None) -> Tensor:
        """[T, C]; rows of images are the image's own (section 9)."""
        embedded_TC = self._embedding_VC[token_ids]
        if images is not None:
            assert bool((token_ids[images.rows] == self.config.image_token_id).all()), "an image in text"
            embedded_TC[images.rows] = images.values
        return embedded_TC

    @torch.inference_mode()
    def head(self, hidden_TC: Tensor) -> Tensor:
        """Logits [T, V] of hidden states."""
        return self.project(self._norm(self.operations, hidden_TC))

    def project(self, normed_TC: Tensor) -> Tensor:
        """Logits [T, V] of hidden states behind a norm; draft blocks have their own."""
        return numerics.linear(self.operations, normed_TC, (self._head,))[0]

    def _image_rows(self, token_ids: Tensor) -> Tensor | None:
        if self.config.image_token_id is None:
            return None
        image_T = token_ids == self.config.image_token_id
        return image_T if bool(image_T.any()) else None
