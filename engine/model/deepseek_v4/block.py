"""One layer of V4: attention and experts, each behind a hyper-connection that reads with its own mix.

Shapes: T rows, N streams, C channels.
"""

from torch import Tensor

from engine.checkpoint.v4_shape import V4Layer
from engine.model.deepseek.hyper_connections import HyperConnection, add_output
from engine.model.deepseek.moe import Share
from engine.model.deepseek.norm import RmsNorm
from engine.model.deepseek_v4.attention import Attention
from engine.model.deepseek_v4.config import DeepseekV4Config
from engine.model.deepseek_v4.routing import HashedExperts, ScoredExperts
from engine.model.deepseek_v4.step import V4Step
from engine.model.tensor_source import TensorSource
from kernels.operations import Operations


class Block:
    """`index` is the layer's, or for a draft block its number behind them. `share`: a rank's experts."""

    def __init__(
        self,
        config: DeepseekV4Config,
        index: int,
        layer: V4Layer,
        source: TensorSource,
        operations: Operations,
        *,
        prefix: str,
        hashed: bool,
        share: Share | None,
    ) -> None:
        c, eps = config.hidden_size, config.rms_norm_eps
        norm = RmsNorm.take(source, f"{prefix}.attn_norm", c, eps)
        self._attention_connection = HyperConnection(config, source, f"{prefix}.hc_attn", norm)
        self._attention = Attention(config, index, layer, source, operations, prefix=f"{prefix}.attn")
        norm = RmsNorm.take(source, f"{prefix}.ffn_norm", c, eps)
        self._experts_connection = HyperConnection(config, source, f"{prefix}.hc_ffn", norm)
        experts = HashedExperts if hashed else ScoredExperts
        self._mixture = experts(config, source, operations, f"{prefix}.ffn", share)

    def __call__(self, step: V4Step, x_TNC: Tensor) -> Tensor:
        """The streams [T, N, C] behind the layer."""
        ops = step.operations
        coefficients, x_TC = self._attention_connection.enter(ops, x_TNC)
        x_TNC = add_output(ops, x_TNC, self._attention(step, x_TC), coefficients).x
        coefficients, x_TC = self._experts_connection.enter(ops, x_TNC)
        return add_output(ops, x_TNC, self._mixture(ops, x_TC, step.token_ids), coefficients).x
