"""A draft block: a window layer whose rows see their sequence's context and each other (section 8.2).

Shapes: T rows, C channels, H heads, D head size, P entries of a pool.
"""

import torch
from torch import Tensor

from engine.model.deepseek.config import DeepseekConfig
from engine.model.deepseek.core_attention import Entries, attend
from engine.model.deepseek.dspark_context import DraftCache, DraftPlan
from engine.model.deepseek.hyper_connections import HyperConnection, Stream, add_output
from engine.model.deepseek.moe import MixtureOfExperts, Share
from engine.model.deepseek.norm import RmsNorm
from engine.model.deepseek.projections import GroupedOutput, Keys, Queries
from engine.model.deepseek.records import decode, encode
from engine.model.deepseek.rope import Angles
from engine.model.tensor_source import TensorSource
from kernels.operations import Operations


class DraftAttention:
    """One latent a token as in the backbone; entries of context come from what `entries` made before."""

    def __init__(
        self, config: DeepseekConfig, source: TensorSource, operations: Operations, prefix: str
    ) -> None:
        self._scale = config.head_dim**-0.5
        self._keys = Keys(config, source, operations, prefix, ())
        self._queries = Queries(config, source, operations, prefix, indexed=False)
        self._sink_H = source.take(f"{prefix}.attn_sink", (config.num_attention_heads,))
        self._output = GroupedOutput(config, source, operations, prefix)

    def entries(self, operations: Operations, x_TC: Tensor, angles: Angles) -> Tensor:
        """[T, D], rotated: of context, and of a pass's own rows."""
        return self._keys(operations, x_TC, angles)[0]

    def __call__(
        self, operations: Operations, x_TC: Tensor, plan: DraftPlan, cache: DraftCache, block: int
    ) -> Tensor:
        """[T, C] of a pass's rows. Their entries are read as a cache would hold them, and kept nowhere."""
        own = encode(operations, cache.record, self.entries(operations, x_TC, plan.angles))
        nothing = torch.zeros(1, own.shape[1], dtype=own.dtype)
        stored = torch.cat((nothing, cache.rings_BF[block, plan.context_ring], own))
        pool_PD = decode(operations, cache.record, stored)
        q_TX = self._queries(operations, x_TC, plan.angles).q
        q_THD = q_TX.view(x_TC.shape[0], self._sink_H.shape[0], -1)
        entries = (Entries(pool_PD, plan.index),)
        out_THD = attend(operations, q_THD, entries, self._sink_H, scale=self._scale, angles=plan.angles)
        return self._output(operations, out_THD)


class DraftBlock:
    """The block with that number. Its experts and hyper-connections are its own."""

    def __init__(
        self,
        config: DeepseekConfig,
        source: TensorSource,
        operations: Operations,
        number: int,
        *,
        share: Share | None = None,
    ) -> None:
        prefix, c, eps = f"mtp.{number}", config.hidden_size, config.rms_norm_eps
        self._number = number
        self.attention = DraftAttention(config, source, operations, f"{prefix}.attn")
        norm = RmsNorm.take(source, f"{prefix}.attn_norm", c, eps)
        self._attention_connection = HyperConnection(config, source, f"{prefix}.hc_attn", norm)
        norm = RmsNorm.take(source, f"{prefix}.ffn_norm", c, eps)
        self._experts_connection = HyperConnection(config, source, f"{prefix}.hc_ffn", norm)
        self._experts = MixtureOfExperts(
            config, source, operations, f"{prefix}.ffn",
            experts=config.dspark_n_routed_experts, experts_per_row=config.dspark_num_experts_per_tok,
            share=share,
        )  # fmt: skip

    def __call__(self, operations: Operations, stream: Stream, plan: DraftPlan, cache: DraftCache) -> Stream:
        """The streams behind the block; sub-layers hand on their mixes as in the backbone."""
        coefficients, x_TC = self._attention_connection.enter(operations, stream.x, stream.premix)
        y_TC = self.attention(operations, x_TC, plan, cache, self._number)
        stream = add_output(operations, stream.x, y_TC, coefficients)
        coefficients, x_TC = self._experts_connection.enter(operations, stream.x, stream.premix)
        return add_output(operations, stream.x, self._experts(operations, x_TC, None), coefficients)
