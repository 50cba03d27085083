"""A draft block: a window layer whose rows see their sequence's context and each other (section 8.2).

Shapes: T rows, C channels, H heads, D head size, P entries of a pool.
"""

import torch
from torch import Tensor

from engine import numerics
from engine.model.deepseek.attention import GroupedOutput
from engine.model.deepseek.config import DeepseekConfig
from engine.model.deepseek.core_attention import Entries, attend
from engine.model.deepseek.dspark_context import DraftCache, DraftPlan
from engine.model.deepseek.hyper_connections import HyperConnection, Stream, add_output
from engine.model.deepseek.moe import MixtureOfExperts
from engine.model.deepseek.norm import RmsNorm
from engine.model.deepseek.rope import Angles, rotate_
from engine.model.tensor_source import TensorSource
from engine.numerics import Dense
from kernels.operations import Operations


class DraftAttention:
    """One latent a token as in the backbone; entries of context come from what `entries` made before."""

    def __init__(self, config: DeepseekConfig, source: TensorSource, prefix: str) -> None:
        c, d, h, rank = config.hidden_size, config.head_dim, config.num_attention_heads, config.q_lora_rank
        self._heads, self._scale = h, d**-0.5
        self._wq_a = Dense.of(source.take(f"{prefix}.wq_a.weight", (rank, c)))
        self._wq_b = Dense.of(source.take(f"{prefix}.wq_b.weight", (h * d, rank)))
        self._wkv = Dense.of(source.take(f"{prefix}.wkv.weight", (d, c)))
        self._q_norm = RmsNorm.take(source, f"{prefix}.q_norm", rank, config.rms_norm_eps)
        self._kv_norm = RmsNorm.take(source, f"{prefix}.kv_norm", d, config.rms_norm_eps)
        self._sink_H = source.take(f"{prefix}.attn_sink", (h,))
        self._output = GroupedOutput(config, source, prefix)

    def entries(self, operations: Operations, x_TC: Tensor, angles: Angles) -> Tensor:
        """[T, D], rotated: of context, and of a pass's own rows."""
        return self._entries(operations, numerics.linear(operations, x_TC, (self._wkv,))[0], angles)

    def __call__(
        self, operations: Operations, x_TC: Tensor, plan: DraftPlan, cache: DraftCache, block: int
    ) -> Tensor:
        """[T, C] of a pass's rows. Their entries are read as a cache would hold them, and kept nowhere."""
        kv_TD, latent = numerics.linear(operations, x_TC, (self._wkv, self._wq_a))
        own = cache.record.encode(self._entries(operations, kv_TD, plan.angles))
        nothing = torch.zeros(1, own.shape[1], dtype=own.dtype)
        pool_PD = cache.record.decode(torch.cat((nothing, cache.rings_BF[block, plan.context_ring], own)))
        queries = numerics.linear(operations, self._q_norm(operations, latent), (self._wq_b,))[0]
        q_THD = queries.view(x_TC.shape[0], self._heads, -1)
        rotate_(q_THD, plan.angles)
        out_THD = attend(q_THD, (Entries(pool_PD, plan.index),), self._sink_H, self._scale)
        rotate_(out_THD, plan.angles.inverse())
        return self._output(operations, out_THD)

    def _entries(self, operations: Operations, kv_TD: Tensor, angles: Angles) -> Tensor:
        kv_TD = self._kv_norm(operations, kv_TD)
        rotate_(kv_TD, angles)
        return kv_TD


class DraftBlock:
    """The block with that number. Its experts and hyper-connections are its own."""

    def __init__(self, config: DeepseekConfig, source: TensorSource, number: int) -> None:
        prefix, c, eps = f"mtp.{number}", config.hidden_size, config.rms_norm_eps
        self._number = number
        self.attention = DraftAttention(config, source, f"{prefix}.attn")
        self._attention_connection = HyperConnection(config, source, f"{prefix}.hc_attn")
        self._attention_norm = RmsNorm.take(source, f"{prefix}.attn_norm", c, eps)
        self._experts_connection = HyperConnection(config, source, f"{prefix}.hc_ffn")
        self._experts_norm = RmsNorm.take(source, f"{prefix}.ffn_norm", c, eps)
        self._experts = MixtureOfExperts(
            config, source, f"{prefix}.ffn", config.dspark_n_routed_experts, config.dspark_num_experts_per_tok
        )

    def __call__(self, operations: Operations, stream: Stream, plan: DraftPlan, cache: DraftCache) -> Stream:
        """The streams behind the block; sub-layers hand on their mixes as in the backbone."""
        coefficients = self._attention_connection.coefficients(operations, stream.x)
        x_TC = self._attention_norm(operations, stream.collapse())
        y_TC = self.attention(operations, x_TC, plan, cache, self._number)
        stream = add_output(stream.x, y_TC, coefficients)
        coefficients = self._experts_connection.coefficients(operations, stream.x)
        x_TC = self._experts_norm(operations, stream.collapse())
        return add_output(stream.x, self._experts(operations, x_TC, None), coefficients)
