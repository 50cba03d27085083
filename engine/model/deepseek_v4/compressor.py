"""The compressors of CSA and HCA (appendix A.1): a group of tokens becomes one entry, and one index key.

pooled = sum_t softmax_t(gate_t + ape_t)_t * value_t, a softmax over the group's tokens for each channel; the
entry is RMSNorm(pooled), rotated at the group's first position. HCA's groups lie side by side. CSA's overlap:
a token has two series, and an entry pools the first series of the group before with the second of its own.

Shapes: T rows, G completed groups, w tokens of an entry, X channels of a token, D channels of an entry,
F rows of the ring of open groups, r tokens between entries.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.checkpoint.v4_shape import V4Layer
from engine.model.deepseek.compressor import pool_group
from engine.model.deepseek.norm import RmsNorm
from engine.model.deepseek.records import encode
from engine.model.deepseek.rope import rotate_
from engine.model.deepseek.rows import GroupPlan
from engine.model.deepseek.step import Step
from engine.model.deepseek_v4.config import DeepseekV4Config
from engine.model.tensor_source import TensorSource
from engine.numerics import Dense


@dataclass(frozen=True, slots=True)
class _Pool:
    """One compressor among those of a layer. `start`: its first channel of a token's X.

    A token has values, then gates; with two series each is twice as wide as an entry.
    """

    start: int
    width: int
    series: int
    norm: RmsNorm

    def pooled(self, tokens_GwX: Tensor) -> Tensor:
        """[G, D], before the norm."""
        values, gates = (self._series(tokens_GwX, part) for part in (0, 1))
        return pool_group(values, gates)

    def _series(self, tokens_GwX: Tensor, part: int) -> Tensor:
        """Values or gates of each token of an entry, [G, w, D]."""
        start, half = self.start + part * self.series * self.width, tokens_GwX.shape[1] // self.series
        return torch.cat(
            [
                tokens_GwX[:, s * half : (s + 1) * half, start + s * self.width :][..., : self.width]
                for s in range(self.series)
            ],
            1,
        )


class Compressor:
    """Main entries of a layer, and the index keys of a CSA layer; `weight` makes a token's X of a row."""

    def __init__(self, config: DeepseekV4Config, layer: V4Layer, source: TensorSource, prefix: str) -> None:
        series = 2 if layer.attention == "csa" else 1
        parts = [(f"{prefix}.compressor", config.head_dim)]
        if layer.attention == "csa":
            parts.append((f"{prefix}.indexer.compressor", config.index_head_dim))
        self._layer, self._width, self._pools = layer, layer.ratio * series, list[_Pool]()
        weights: list[Tensor] = []
        biases: list[Tensor] = []
        start = 0
        for name, width in parts:
            columns = series * width
            for matrix in ("wkv", "wgate"):
                weights.append(source.take(f"{name}.{matrix}.weight", (columns, config.hidden_size)))
            biases += [torch.zeros(layer.ratio, columns), source.take(f"{name}.ape", (layer.ratio, columns))]
            norm = RmsNorm.take(source, f"{name}.norm", width, config.rms_norm_eps)
            self._pools.append(_Pool(start, width, series, norm))
            start += 2 * columns
        self.weight, self._bias_rX = Dense.of(torch.cat(weights)), torch.cat(biases, 1)
        absent = [torch.full_like(bias[:1], -torch.inf if i % 2 else 0.0) for i, bias in enumerate(biases)]
        self._nothing_1X = torch.cat(absent, 1)  # a token before the first: no value, and no weight

    def write(self, step: Step, index: int, tokens_TX: Tensor) -> None:
        """Entries of the groups that the step completes; what groups stay open is left in the cache.

        `tokens_TX`: the rows through `weight`; changed. `index`: of the layer.
        """
        plan = step.groups(self._layer.ratio, self._width)
        cached = step.cache.sources[index]
        step.shared.index_keys = {}
        tokens_TX += self._bias_rX[plan.phases]
        groups_GwX = self._groups(plan, cached.open, tokens_TX)
        if plan.written.shape[0] == 0:
            return
        angles = step.group_angles(self._layer.ratio, self._width)
        stores = ((cached.main, step.cache.records.main), (cached.index, step.cache.records.index))
        for pool, (stored, record) in zip(self._pools, stores, strict=False):
            entries_GD = pool.norm(step.operations, pool.pooled(groups_GwX))
            rotate_(entries_GD, angles)
            stored[plan.entries] = encode(step.operations, record, entries_GD[plan.written])

    def _groups(self, plan: GroupPlan, open_FX: Tensor | None, tokens_TX: Tensor) -> Tensor:
        """[G, w, X]: the tokens of each completed group. What later groups read goes into the ring."""
        if plan.members is None or open_FX is None:  # HCA with groups of one token
            return tokens_TX[:, None]
        return plan.members.exchange(open_FX, tokens_TX, self._nothing_1X)
