"""V4's attention, one layer (appendix A.1): window entries, and entries that the layer itself compresses.

CSA layers attend to the entries that their indexer selects, HCA layers to all. Beside V4.1's there is a norm
of each query head, without weights.
Shapes: T rows, C channels, H heads, D head size, W window, Q rank of the query latent, M = T*H.
"""

import torch
from torch import Tensor

from engine import numerics
from engine.checkpoint.v4_shape import V4Layer
from engine.model.deepseek.attention import GroupedOutput, store_window
from engine.model.deepseek.core_attention import Entries, attend
from engine.model.deepseek.indexer import Indexer
from engine.model.deepseek.norm import RmsNorm
from engine.model.deepseek.roles import LayerRole
from engine.model.deepseek.rope import rotate_
from engine.model.deepseek_v4.compressor import Compressor
from engine.model.deepseek_v4.config import DeepseekV4Config
from engine.model.deepseek_v4.heavy_attention import Compressed, HeavyAttention
from engine.model.deepseek_v4.step import V4Step
from engine.model.tensor_source import TensorSource
from engine.numerics import Dense


class Attention:
    """`index` is the layer's, or for a draft block its number behind them."""

    def __init__(
        self, config: DeepseekV4Config, index: int, layer: V4Layer, source: TensorSource, prefix: str
    ) -> None:
        c, d, h, rank = config.hidden_size, config.head_dim, config.num_attention_heads, config.q_lora_rank
        self._index, self._layer, self._heads, self._scale = index, layer, h, d**-0.5
        wq_a = Dense.of(source.take(f"{prefix}.wq_a.weight", (rank, c)))
        wq_b = Dense.of(source.take(f"{prefix}.wq_b.weight", (h * d, rank)))
        wkv = Dense.of(source.take(f"{prefix}.wkv.weight", (d, c)))
        self._q_norm = RmsNorm.take(source, f"{prefix}.q_norm", rank, config.rms_norm_eps)
        self._head_norm = RmsNorm(torch.ones(d), config.rms_norm_eps)
        self._kv_norm = RmsNorm.take(source, f"{prefix}.kv_norm", d, config.rms_norm_eps)
        self._sink_H = source.take(f"{prefix}.attn_sink", (h,))
        self._output = GroupedOutput(config, source, prefix)
        self._heavy = HeavyAttention(self._sink_H, self._scale)
        self._compressor = self._indexer = None
        if layer.ratio:
            self._compressor = Compressor(config, layer, source, prefix)
        if layer.attention == "csa":
            role = LayerRole(index, "full", layer.ratio, index, index, False, False)
            self._indexer = Indexer(config, role, source, f"{prefix}.indexer")
        self._of_rows = (wkv, wq_a, *((self._compressor.weight,) if self._compressor else ()))
        self._of_rows += (self._indexer.head_weights,) if self._indexer else ()
        self._of_latents = (wq_b, *((self._indexer.query,) if self._indexer else ()))

    def __call__(self, step: V4Step, x_TC: Tensor) -> Tensor:
        """[T, C] of the step's rows, whose entries it writes. One product for all that comes from x."""
        ops, angles = step.operations, step.angles(step.rows, self._layer.ratio)
        kv_TD, latent_TQ, *more = numerics.linear(ops, x_TC, self._of_rows)
        kv_TD = self._kv_norm(ops, kv_TD)
        rotate_(kv_TD, angles)
        view = step.view(self._index)
        near = Entries(store_window(step, self._index, view.windows, kv_TD), view.index)
        if self._compressor is not None:
            self._compressor.write(step, self._index, more[0])
        queries = numerics.linear(ops, self._q_norm(ops, latent_TQ), self._of_latents)
        q_MD = self._head_norm(ops, queries[0].view(x_TC.shape[0] * self._heads, -1))
        q_THD = q_MD.view(x_TC.shape[0], self._heads, -1)
        rotate_(q_THD, angles)
        if self._indexer is not None:
            step.shared.selection = self._indexer.select(step, step.rows, queries[1], more[1])
        out_THD = self._attend(step, q_THD, near)
        rotate_(out_THD, angles.inverse())
        return self._output(ops, out_THD)

    def _attend(self, step: V4Step, q_THD: Tensor, near: Entries) -> Tensor:
        if self._layer.attention == "window":
            return attend(q_THD, [near], self._sink_H, self._scale)
        if self._layer.attention == "csa":
            assert step.shared.selection is not None
            return attend(q_THD, [near, step.shared.selection.entries], self._sink_H, self._scale)
        stored, visible = step.cache.sources[self._index].main, step.visible(self._layer.ratio)
        far = Compressed(stored, step.cache.records.main, visible)
        return self._heavy(step.operations, q_THD, near, far)
