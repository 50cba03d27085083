"""DeepSeek-V4.1's text model (sections 1 to 7).

Shapes: T rows, N streams, C channels, V vocabulary. It differs from the release in nothing but the type of
its arithmetic, float32 throughout; caches keep the released formats unless they are switched off.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine import numerics
from engine.checkpoint.parts import WHOLE, Part
from engine.errors import InvalidRequest
from engine.model.deepseek.block import Block, CutKeys
from engine.model.deepseek.cache import DeepseekCache, SequenceCache, bytes_per_token
from engine.model.deepseek.config import DeepseekConfig
from engine.model.deepseek.engram import EngramMemory
from engine.model.deepseek.hyper_connections import Stream
from engine.model.deepseek.image_span import ImageRows
from engine.model.deepseek.moe import Exchange, share_of
from engine.model.deepseek.norm import RmsNorm
from engine.model.deepseek.roles import LayerRole, cut_layer, layer_roles
from engine.model.deepseek.rope import RotaryTables
from engine.model.deepseek.rows import SequenceRows
from engine.model.deepseek.step import Observer, Step
from engine.model.deepseek.text_model import TextModel
from engine.model.stages import StageClock
from engine.model.tensor_source import TensorSource
from engine.numerics import Dense
from kernels.operations import Operations
from protocol.errors import InvalidInput


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
        *,
        part: Part = WHOLE,
        exchange: Exchange | None = None,
    ) -> None:
        """`compressed_ids`: of the tokenizer (`engram_hash.compress_ids`), where the model has Engram layers.

        `part`: that the source was opened with. Of the encoder alone, `forward` leaves what decoder layers
        read, and there are no logits. Of some experts, `exchange` brings the other ranks' outputs.
        Raises BrokenModelFile: a tensor missing or misshapen, or ids of another tokenizer; InvalidInput: a
        part that this model cannot run as.
        """
        self.config, self.operations, self.part, self.exchange = config, operations, part, exchange
        _check_part(config, part)
        v, c = config.vocab_size, config.hidden_size
        self._embedding_VC = source.take("embed.weight", (v, c))
        self._engram = EngramMemory(config, source, operations, compressed_ids)
        self._tables = RotaryTables.of(config)
        roles, cut = layer_roles(config), cut_layer(config)
        self._blocks = [self._block(role, source) for role in (roles[:cut] if part.encoder_only else roles)]
        self._cut_keys = self._head = self._norm = None
        if part.encoder_only:
            self._cut_keys = CutKeys(config, roles[cut], source, operations)
        else:
            self._head = Dense.of(source.take("head.weight", (v, c)))
            self._norm = RmsNorm.take(source, "norm", c, config.rms_norm_eps)

    def _block(self, role: LayerRole, source: TensorSource) -> Block:
        share = share_of(self.part.experts_of(role.layer), self.exchange)
        engram = self._engram.layers.get(role.layer)
        return Block(self.config, role, source, self.operations, engram, share=share)

    @property
    def shape(self) -> DeepseekConfig:
        return self.config

    @property
    def identity(self) -> str:
        """Engram's ids, which come from the tokenizer, and that shares run operations one by one, which round
        otherwise than a mixture in one call.
        """
        fused = self.operations.fused is not None and self.part.experts is None
        return f"{self._engram.ids_digest} {'whole mixtures' if fused else 'single operations'}"

    @property
    def interruptible(self) -> bool:
        """Not with other ranks, which would wait, nor while Engram rows are on their way to the decoder."""
        late = any(layer >= cut_layer(self.config) for layer in self.config.engram_layer_ids)
        return self.exchange is None and not late

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
        *,
        clock: StageClock | None = None,
    ) -> Tensor:
        """Run the rows of several sequences through all layers; hidden states [T, C], collapsed.

        token_ids int64 [T], sequence after sequence, each of another slot; rows of `images` carry the image
        token. Rows that decoder layers do not see (`SequenceRows.decoder_from`) come out as zeros, and so do
        all rows of the encoder alone. A row's bits depend on its sequence alone. `clock` is told of encoder
        and bridge as they have run, and may end the step there: StageInterrupted.
        """
        self._check(token_ids, sequences, cache)
        step = Step(self.operations, cache, self._tables, list(sequences), observer, clock=clock)
        lookups = self._engram.issue(step, token_ids)
        image_T = self._image_rows(token_ids)
        stream = Stream.of(self.embed(token_ids, images), self.config.hc_mult)
        for block in self._blocks:
            layer = block.role.layer
            if layer == cache.cut:
                step.passed("encoder")
            if layer == cache.cut and image_T is not None and step.picked is not None:
                image_T = image_T[step.picked]
            stream = block(step, stream, image_T, lookups)
            if stream.x.shape[0] == 0:
                break
            if observer is not None:
                observer.left(layer, stream, step.view(layer).queries)
        if self._cut_keys is not None:
            step.passed("encoder")
            self._cut_keys(step, stream)
            return torch.zeros(len(token_ids), self.config.hidden_size)
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
        """Logits [T, V] of hidden states. Raises InvalidRequest where the encoder is all there is."""
        if self._norm is None:
            raise InvalidRequest(
                "a model of the encoder alone leaves keys and values, and says nothing",
                parameter="logits",
                hint="hand them to a worker that holds the decoder",
            )
        return self.project(self._norm(self.operations, hidden_TC))

    def project(self, normed_TC: Tensor) -> Tensor:
        """Logits [T, V] of hidden states behind a norm; draft blocks have their own."""
        assert self._head is not None, "the encoder alone has no head"
        return numerics.linear(self.operations, normed_TC, (self._head,))[0]

    def _image_rows(self, token_ids: Tensor) -> Tensor | None:
        if self.config.image_token_id is None:
            return None
        image_T = token_ids == self.config.image_token_id
        return image_T if bool(image_T.any()) else None


def _check_part(config: DeepseekConfig, part: Part) -> None:
    if not part.encoder_only:
        return
    cut = cut_layer(config)
    if cut == config.num_hidden_layers:
        raise InvalidInput("part.encoder_only: without kv_source_layer_ids there is no encoder")
    late = [layer for layer in config.engram_layer_ids if layer >= cut]
    if late:
        raise InvalidInput(
            f"part.encoder_only: engram_layer_ids has {late}, not before the decoder's first, {cut}",
            hint="such a model runs whole",
        )
