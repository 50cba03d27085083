"""V4's attention, one layer (appendix A.1): window entries, and entries that the layer itself compresses.

CSA layers attend to the entries that their indexer selects, HCA layers to all. Beside V4.1's there is a norm
of each query head, without weights.
Shapes: T rows, C channels, H heads, D head size, W window, Q rank of the query latent, M = T*H.
"""

from torch import Tensor

from engine.checkpoint.v4_shape import V4Layer
from engine.model.deepseek.attention import store_window
from engine.model.deepseek.core_attention import Entries, attend
from engine.model.deepseek.indexer import Indexer
from engine.model.deepseek.projections import GroupedOutput, Keys, Queries
from engine.model.deepseek.roles import LayerRole
from engine.model.deepseek.rope import Angles
from engine.model.deepseek_v4.compressor import Compressor
from engine.model.deepseek_v4.config import DeepseekV4Config
from engine.model.deepseek_v4.heavy_attention import Compressed, HeavyAttention
from engine.model.deepseek_v4.step import V4Step
from engine.model.tensor_source import TensorSource
from kernels.operations import Operations


class Attention:
    """`index` is the layer's, or for a draft block its number behind them."""

    def __init__(
        self,
        config: DeepseekV4Config,
        index: int,
        layer: V4Layer,
        source: TensorSource,
        operations: Operations,
        *,
        prefix: str,
    ) -> None:
        self._index, self._layer, self._scale = index, layer, config.head_dim**-0.5
        self._sink_H = source.take(f"{prefix}.attn_sink", (config.num_attention_heads,))
        self._output = GroupedOutput(config, source, operations, prefix)
        self._heavy = HeavyAttention(self._sink_H, self._scale)
        self._compressor = Compressor(config, layer, source, prefix) if layer.ratio else None
        compressed = (self._compressor.weight,) if self._compressor is not None else ()
        self._keys = Keys(config, source, operations, prefix, compressed)
        indexed = layer.attention == "csa"
        self._queries = Queries(config, source, operations, prefix, indexed=indexed, head_norm=True)
        self._indexer = None
        if indexed:
            self._indexer = Indexer(config, LayerRole(index, "full", layer.ratio, index, index, False, False))

    def __call__(self, step: V4Step, x_TC: Tensor) -> Tensor:
        """[T, C] of the step's rows, whose entries it writes."""
        ops, angles = step.operations, step.angles(step.rows, self._layer.ratio)
        kv_TD, *tokens = self._keys(ops, x_TC, angles)
        view = step.view(self._index)
        pool_PD = store_window(step, self._index, view.windows, kv_TD)
        if self._compressor is not None:
            self._compressor.write(step, self._index, tokens[0])
        rows = self._queries(ops, x_TC, angles)
        if self._indexer is not None:
            step.shared.selection = self._indexer.select(step, step.rows, rows)
        q_THD = rows.q.view(x_TC.shape[0], self._sink_H.shape[0], -1)
        near = Entries(pool_PD, view.index, view.windows.first)
        return self._output(ops, self._attend(step, q_THD, near, angles))

    def _attend(self, step: V4Step, q_THD: Tensor, near: Entries, angles: Angles) -> Tensor:
        if self._layer.attention == "hca":
            stored, visible = step.cache.sources[self._index].main, step.visible(self._layer.ratio)
            far = Compressed(stored, step.cache.records.main, visible)
            return self._heavy(step.operations, q_THD, near, far, angles)
        entries = [near]
        if self._layer.attention == "csa":
            assert step.shared.selection is not None
            entries.append(step.shared.selection.entries)
        return attend(step.operations, q_THD, entries, self._sink_H, scale=self._scale, angles=angles)
