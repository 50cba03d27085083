"""CSA2, one layer's attention (section 2): window entries of its own, compressed entries of its kv source.

Shapes: T rows, C channels, H heads, D head size, W window, Q rank of the query latent.
"""

import torch
from torch import Tensor

from engine import numerics
from engine.model.deepseek.compressor import Compressor
from engine.model.deepseek.config import DeepseekConfig
from engine.model.deepseek.core_attention import Entries, attend
from engine.model.deepseek.indexer import Indexer, IndexKeys
from engine.model.deepseek.norm import RmsNorm
from engine.model.deepseek.records import Records
from engine.model.deepseek.roles import LayerRole
from engine.model.deepseek.rope import rotate_
from engine.model.deepseek.rows import WindowPlan
from engine.model.deepseek.shape import TextShape
from engine.model.deepseek.step import Step, View
from engine.model.tensor_source import TensorSource
from engine.numerics import Dense
from kernels.operations import Operations


class Attention:
    """`write` makes a layer's keys, `mix` its output; a call does both."""

    def __init__(self, config: DeepseekConfig, role: LayerRole, source: TensorSource, prefix: str) -> None:
        c, d, h, rank = config.hidden_size, config.head_dim, config.num_attention_heads, config.q_lora_rank

        def dense(name: str, rows: int, columns: int) -> Dense:
            return Dense.of(source.take(f"{prefix}.{name}.weight", (rows, columns)))

        self._role, self._heads, self._scale, self._records = role, h, d**-0.5, Records.of(config)
        self._wq_a, self._wq_b, self._wkv = (
            dense("wq_a", rank, c),
            dense("wq_b", h * d, rank),
            dense("wkv", d, c),
        )
        self._q_norm = RmsNorm.take(source, f"{prefix}.q_norm", rank, config.rms_norm_eps)
        self._kv_norm = RmsNorm.take(source, f"{prefix}.kv_norm", d, config.rms_norm_eps)
        self._sink_H = source.take(f"{prefix}.attn_sink", (h,))
        self._output = GroupedOutput(config, source, prefix)
        self._compressor = self._index_keys = self._indexer = None
        if role.owns_entries:
            self._compressor = Compressor(config, source, f"{prefix}.compressor", role.ratio)
            self._index_keys = IndexKeys(config, source, f"{prefix}.indexer")
        if role.owns_selection:
            self._indexer = Indexer(config, role, source, f"{prefix}.indexer")
        self._key_weights = (self._wkv, *(self._compressor.weights if self._compressor else ()))
        self._query_weights = (self._wq_a, *((self._indexer.head_weights,) if self._indexer else ()))

    def __call__(self, step: Step, x_TC: Tensor, view: View) -> Tensor:
        """[T, C], of a view that picks no rows. One product for all that comes from x."""
        weights = (*self._key_weights, *self._query_weights)
        projected = numerics.linear(step.operations, x_TC, weights)
        keys = len(self._key_weights)
        pool = self._write(step, projected[:keys], view)
        return self._mix(step, projected[keys:], view, pool)

    def write(self, step: Step, x_TC: Tensor, view: View) -> Tensor:
        """Keys of all rows of the view, into the cache; the pool of window entries for `mix`."""
        return self._write(step, numerics.linear(step.operations, x_TC, self._key_weights), view)

    def mix(self, step: Step, x_TC: Tensor, view: View, pool_PD: Tensor) -> Tensor:
        """[T, C] of the view's queries, whose rows x holds."""
        return self._mix(step, numerics.linear(step.operations, x_TC, self._query_weights), view, pool_PD)

    def _write(self, step: Step, projected: list[Tensor], view: View) -> Tensor:
        kv_TD = self._kv_norm(step.operations, projected[0])
        rotate_(kv_TD, step.angles(view.rows, self._role.ratio))
        pool_PD = store_window(step, self._role.layer, view.windows, kv_TD)
        if self._compressor is not None:
            self._write_entries(step, projected[1:])
        return pool_PD

    def _write_entries(self, step: Step, projected: list[Tensor]) -> None:
        """Main entries and index keys of the groups that the step completes."""
        assert self._compressor is not None
        assert self._index_keys is not None
        plan, angles = step.groups(self._role.ratio)
        entries = step.cache.sources[self._role.layer]
        latents_GD = self._compressor.latents(step.operations, projected, plan, entries.open)
        step.shared.index_keys = {}
        if plan.written.shape[0] == 0:
            return
        keys = self._index_keys(step.operations, latents_GD, angles)
        rotate_(latents_GD, angles)
        entries.main[plan.entries] = self._records.main.encode(latents_GD[plan.written])
        entries.index[plan.entries] = self._records.index.encode(keys[plan.written])

    def _mix(self, step: Step, projected: list[Tensor], view: View, pool_PD: Tensor) -> Tensor:
        latent_TQ = self._q_norm(step.operations, projected[0])
        weights = (self._wq_b, *((self._indexer.query,) if self._indexer else ()))
        queries = numerics.linear(step.operations, latent_TQ, weights)
        angles = step.angles(view.queries, self._role.ratio)
        q_THD = queries[0].view(latent_TQ.shape[0], self._heads, -1)
        rotate_(q_THD, angles)
        if self._indexer is not None:
            step.shared.selection = self._indexer.select(step, view.queries, queries[1], projected[1])
        entries = [Entries(pool_PD, view.index)]
        if self._role.ratio:
            assert step.shared.selection is not None
            entries.append(step.shared.selection.entries)
        out_THD = attend(q_THD, entries, self._sink_H, self._scale)
        rotate_(out_THD, angles.inverse())
        return self._output(step.operations, out_THD)


def store_window(step: Step, layer: int, windows: WindowPlan, kv_TD: Tensor) -> Tensor:
    """Rotated entries of the step's rows, into a layer's ring; the pool that the windows' index points into.

    The value that attention reads is the stored one, of the current row too.
    """
    record, ring = step.cache.records.window, step.cache.window_LF[layer]
    stored = record.encode(kv_TD)
    nothing = torch.zeros(1, stored.shape[1], dtype=stored.dtype)
    pool_PD = record.decode(windows.pool(ring, stored, nothing))
    ring[windows.stored_ring] = stored[windows.stored_rows]
    return pool_PD


class GroupedOutput:
    """Groups of heads each through their own matrix, then all through one (section 2.1, step 8)."""

    def __init__(self, config: TextShape, source: TensorSource, prefix: str) -> None:
        groups, rank = config.o_groups, config.o_lora_rank
        columns = config.num_attention_heads * config.head_dim // groups
        grouped = source.take(f"{prefix}.wo_a.weight", (groups * rank, columns))
        self._wo_a = [Dense.of(part) for part in grouped.chunk(groups)]
        self._wo_b = Dense.of(source.take(f"{prefix}.wo_b.weight", (config.hidden_size, groups * rank)))

    def __call__(self, operations: Operations, out_THD: Tensor) -> Tensor:
        """[T, C]."""
        groups = out_THD.flatten(1).chunk(len(self._wo_a), 1)
        latents = [
            numerics.linear(operations, group.contiguous(), (weight,))[0]
            for group, weight in zip(groups, self._wo_a, strict=True)
        ]
        return numerics.linear(operations, torch.cat(latents, 1), (self._wo_b,))[0]
