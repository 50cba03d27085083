"""DeepSeek-V4's text model (appendix A.1), from released tensor names to logits.

Shapes: T rows, N streams, C channels, V vocabulary. Arithmetic is float32 throughout, and differs from the
release's in nothing else; caches keep the release's formats unless they are switched off.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine import numerics
from engine.checkpoint.parts import WHOLE, Part
from engine.model.deepseek.cache import SequenceCache
from engine.model.deepseek.hyper_connections import Stream
from engine.model.deepseek.moe import Exchange, share_of
from engine.model.deepseek.norm import RmsNorm
from engine.model.deepseek.rope import RotaryTables
from engine.model.deepseek.rows import SequenceRows
from engine.model.deepseek.step import Observer
from engine.model.deepseek.text_model import TextModel
from engine.model.deepseek_v4.block import Block
from engine.model.deepseek_v4.cache import DeepseekV4Cache, bytes_per_token
from engine.model.deepseek_v4.config import DeepseekV4Config
from engine.model.deepseek_v4.hyper_head import HyperHead
from engine.model.deepseek_v4.step import V4Step
from engine.model.stages import StageClock
from engine.model.tensor_source import TensorSource
from engine.numerics import Dense
from kernels.operations import Operations
from protocol.errors import InvalidInput


class DeepseekV4Model(TextModel):
    """Weights and arithmetic; holds no state of a request. Not thread-safe.

    Tensors of draft blocks stay in the source (`mtp.DraftBlock` takes them); its owner ends the taking.
    """

    def __init__(
        self,
        config: DeepseekV4Config,
        source: TensorSource,
        operations: Operations,
        *,
        part: Part = WHOLE,
        exchange: Exchange | None = None,
    ) -> None:
        """Of some experts, `exchange` brings the other ranks' outputs.

        Raises BrokenModelFile: a tensor missing or misshapen; InvalidInput: a part without an exchange, or of
        an encoder, which V4 does not have.
        """
        if part.encoder_only:
            raise InvalidInput("part.encoder_only: a DeepSeek-V4 has no encoder apart")
        self.config, self.operations, self.part, self.exchange = config, operations, part, exchange
        v, c = config.vocab_size, config.hidden_size
        self._embedding_VC = source.take("embed.weight", (v, c))
        self._head = Dense.of(source.take("head.weight", (v, c)))
        self._norm = RmsNorm.take(source, "norm", c, config.rms_norm_eps)
        self._hyper_head = HyperHead(config, source, "")
        self._blocks = [
            Block(
                config,
                i,
                layer,
                source,
                operations,
                prefix=f"layers.{i}",
                hashed=i < config.num_hash_layers,
                share=share_of(part.experts_of(i), exchange),
            )
            for i, layer in enumerate(config.layers)
        ]
        self._tables = RotaryTables.of(config)

    @property
    def shape(self) -> DeepseekV4Config:
        return self.config

    @property
    def identity(self) -> str:
        """Shares run operations one by one, which round otherwise than a mixture in one call."""
        fused = self.operations.fused is not None and self.part.experts is None
        return "whole mixtures" if fused else "single operations"

    def cache_bytes_per_token(self) -> float:
        """Bytes of persistent (global) KV a token: 3514.25 for Flash."""
        return bytes_per_token(self.config)

    def new_cache(self, num_blocks: int, block_tokens: int, num_slots: int) -> DeepseekV4Cache:
        return DeepseekV4Cache(self.config, num_blocks, block_tokens, num_slots)

    @torch.inference_mode()
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

        token_ids int64 [T], sequence after sequence, each of another slot. A row's bits depend on its
        sequence alone. The observer sees the streams behind each layer, with the mix of none. There are no
        stages to tell a `clock` of.
        """
        step = self.step(token_ids, sequences, cache, observer)
        stream = Stream.of(self.embed(token_ids), self.config.hc_mult)
        for layer, block in enumerate(self._blocks):
            stream = Stream(block(step, stream.x), stream.premix)
            if observer is not None:
                observer.left(layer, stream, step.rows)
        return self._hyper_head(self.operations, stream.x)

    def step(
        self,
        token_ids: Tensor,
        sequences: Sequence[SequenceRows],
        cache: SequenceCache,
        observer: Observer | None = None,
    ) -> V4Step:
        """The plans of a forward step: of this model, or of its draft blocks."""
        assert isinstance(cache, DeepseekV4Cache)
        self._check(token_ids, sequences, cache)
        return V4Step(self.operations, cache, self._tables, list(sequences), observer, token_ids=token_ids)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T, C]."""
        return self._embedding_VC[token_ids]

    @torch.inference_mode()
    def head(self, hidden_TC: Tensor) -> Tensor:
        """Logits [T, V] of hidden states."""
        return self.project(self._norm(self.operations, hidden_TC))

    def project(self, normed_TC: Tensor) -> Tensor:
        """Logits [T, V] of hidden states behind a norm; draft blocks have their own."""
        return numerics.linear(self.operations, normed_TC, (self._head,))[0]
