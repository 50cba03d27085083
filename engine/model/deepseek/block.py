"""One layer: Engram where it has one, then attention and experts behind hyper-connections (sections 1, 5).

And what a prefill worker runs of the layer at the cut.
"""

from torch import Tensor

from engine.model.deepseek.attention import Attention, LayerKeys
from engine.model.deepseek.config import DeepseekConfig
from engine.model.deepseek.engram import Engram, Lookups
from engine.model.deepseek.hyper_connections import HyperConnection, Stream, StreamReader, add_output
from engine.model.deepseek.moe import MixtureOfExperts, Share
from engine.model.deepseek.norm import RmsNorm
from engine.model.deepseek.roles import LayerRole
from engine.model.deepseek.step import Step
from engine.model.tensor_source import TensorSource
from kernels.operations import Operations


class Block:
    """A sub-layer reads the stream with the mix that the sub-layer before handed on."""

    def __init__(
        self,
        config: DeepseekConfig,
        role: LayerRole,
        source: TensorSource,
        operations: Operations,
        engram: Engram | None,
        *,
        share: Share | None = None,
    ) -> None:
        prefix, c, eps = f"layers.{role.layer}", config.hidden_size, config.rms_norm_eps
        self.role, self._engram = role, engram
        norm = RmsNorm.take(source, f"{prefix}.attn_norm", c, eps)
        self._attention_connection = HyperConnection(config, source, f"{prefix}.hc_attn", norm)
        self._attention = Attention(config, role, source, operations, f"{prefix}.attn")
        norm = RmsNorm.take(source, f"{prefix}.ffn_norm", c, eps)
        self._experts_connection = HyperConnection(config, source, f"{prefix}.hc_ffn", norm)
        self._experts = MixtureOfExperts(
            config, source, operations, f"{prefix}.ffn",
            experts=config.n_routed_experts, experts_per_row=config.num_experts_per_tok, share=share,
        )  # fmt: skip

    def __call__(self, step: Step, stream: Stream, image_T: Tensor | None, lookups: Lookups | None) -> Stream:
        """The streams of the view's queries, which are fewer than came in where the view picks rows."""
        ops, view = step.operations, step.view(self.role.layer)
        if self._engram is not None and lookups is not None:
            rows = step.picked if view.rows is step.kept else None
            found, dead_T = lookups.wait(self.role.layer, rows)
            stream = Stream(self._engram(ops, stream.x, found, dead_T), stream.premix)
        coefficients, x_TC = self._attention_connection.enter(ops, stream.x, stream.premix, view.picked)
        if view.picked is None:
            y_TC = self._attention(step, x_TC, view)
        else:
            pool = self._attention.write(step, x_TC, view)
            if len(view.queries) == 0:
                return stream[view.picked]
            stream, x_TC = stream[view.picked], x_TC[view.picked]
            y_TC = self._attention.mix(step, x_TC, view, pool)
        stream = add_output(ops, stream.x, y_TC, coefficients)
        coefficients, x_TC = self._experts_connection.enter(ops, stream.x, stream.premix)
        return add_output(ops, stream.x, self._experts(ops, x_TC, image_T), coefficients)


class CutKeys:
    """What the layer at the cut leaves of all rows (section 1.3, step 2): the rest of it is the decoder's."""

    def __init__(
        self, config: DeepseekConfig, role: LayerRole, source: TensorSource, operations: Operations
    ) -> None:
        prefix = f"layers.{role.layer}"
        norm = RmsNorm.take(source, f"{prefix}.attn_norm", config.hidden_size, config.rms_norm_eps)
        self._role, self._reader = role, StreamReader(config, norm)
        self._keys = LayerKeys(config, role, source, operations, f"{prefix}.attn")

    def __call__(self, step: Step, stream: Stream) -> None:
        x_TC = self._reader(step.operations, stream)
        self._keys.write(step, x_TC, step.view(self._role.layer))
