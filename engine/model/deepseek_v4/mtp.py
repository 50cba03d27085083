"""V4's draft block in its original form (appendix A.1): one layer that predicts one token further.

x = h_proj(hnorm(stream)) + e_proj(enorm(embed(next token))), the latter for every stream; then a window layer
with experts by score, a hyper-head and a norm of its own; embedding and head are the model's. It loads and
runs; nothing drafts with it yet.
Shapes: T rows, N streams, C channels, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine import numerics
from engine.checkpoint.v4_shape import V4Layer
from engine.model.deepseek.cache import SequenceCache
from engine.model.deepseek.moe import share_of
from engine.model.deepseek.norm import RmsNorm
from engine.model.deepseek.rows import SequenceRows
from engine.model.deepseek_v4.block import Block
from engine.model.deepseek_v4.hyper_head import HyperHead
from engine.model.deepseek_v4.model import DeepseekV4Model
from engine.model.tensor_source import TensorSource
from engine.numerics import Dense


class DraftBlock:
    """The block with that number, `mtp.0` for 0. Its window lies in the model's cache, behind the layers'."""

    def __init__(self, model: DeepseekV4Model, source: TensorSource, number: int = 0) -> None:
        """Raises BrokenModelFile: a tensor missing or misshapen."""
        config = model.config
        assert number < config.num_nextn_predict_layers
        c, eps, prefix = config.hidden_size, config.rms_norm_eps, f"mtp.{number}"
        self._model = model
        self._embedding_norm = RmsNorm.take(source, f"{prefix}.enorm", c, eps)
        self._stream_norm = RmsNorm.take(source, f"{prefix}.hnorm", c, eps)
        self._of_embedding, self._of_stream = (
            Dense.prepared(source.take(f"{prefix}.{name}_proj.weight", (c, c)), model.operations)
            for name in ("e", "h")
        )
        index = config.num_hidden_layers + number
        layer = V4Layer("window", 0)
        share = share_of(model.part.draft_experts_of(number), model.exchange)
        self._block = Block(
            config, index, layer, source, model.operations, prefix=prefix, hashed=False, share=share
        )
        self._hyper_head = HyperHead(config, source, f"{prefix}.")
        self._norm = RmsNorm.take(source, f"{prefix}.norm", c, eps)

    @torch.inference_mode()
    def forward(
        self, next_ids: Tensor, x_TNC: Tensor, sequences: Sequence[SequenceRows], cache: SequenceCache
    ) -> tuple[Tensor, Tensor]:
        """Logits [T, V] of the token after the next one, and the streams [T, N, C] behind the block.

        `x_TNC`: the streams behind the model's last layer, of the same rows; `next_ids` int64 [T]: the token
        that follows each.
        """
        ops, step = self._model.operations, self._model.step(next_ids, sequences, cache)
        embedded_TC = self._embedding_norm(ops, self._model.embed(next_ids))
        of_token_TC = numerics.linear(ops, embedded_TC, (self._of_embedding,))[0]
        streams = self._stream_norm(ops, x_TNC.flatten(0, 1))
        of_stream = numerics.linear(ops, streams, (self._of_stream,))[0].view_as(x_TNC)
        x_TNC = self._block(step, of_stream + of_token_TC[:, None])
        normed_TC = self._norm(ops, self._hyper_head(ops, x_TNC))
        return self._model.project(normed_TC), x_TNC
