"""CSA2, one layer's attention (section 2): window entries of its own, compressed entries of its kv source.

Shapes: T rows, C channels, H heads, D head size, W window, Q rank of the query latent.
"""

from torch import Tensor

from engine.model.deepseek.compressor import Compressor
from engine.model.deepseek.config import DeepseekConfig
from engine.model.deepseek.core_attention import Entries, attend
from engine.model.deepseek.indexer import Indexer, IndexKeys
from engine.model.deepseek.projections import GroupedOutput, Keys, Queries
from engine.model.deepseek.records import Records, decode, encode
from engine.model.deepseek.roles import LayerRole
from engine.model.deepseek.rope import rotate_
from engine.model.deepseek.rows import WindowPlan
from engine.model.deepseek.step import Step, View
from engine.model.tensor_source import TensorSource
from kernels.operations import Operations


class LayerKeys:
    """What a layer leaves in the caches: window entries, and a kv source's main entries and index keys."""

    def __init__(
        self,
        config: DeepseekConfig,
        role: LayerRole,
        source: TensorSource,
        operations: Operations,
        prefix: str,
    ) -> None:
        self._role, self._records = role, Records.of(config)
        self._compressor = self._index_keys = None
        if role.owns_entries:
            self._compressor = Compressor(config, source, f"{prefix}.compressor", role.ratio)
            self._index_keys = IndexKeys(config, source, f"{prefix}.indexer")
        compressed = self._compressor.weights if self._compressor is not None else ()
        self._keys = Keys(config, source, operations, prefix, compressed)

    def write(self, step: Step, x_TC: Tensor, view: View) -> Tensor:
        """Keys of all rows of the view, into the cache; the pool of window entries for `mix`."""
        kv_TD, *projected = self._keys(step.operations, x_TC, step.angles(view.rows, self._role.ratio))
        pool_PD = store_window(step, self._role.layer, view.windows, kv_TD)
        if self._compressor is not None:
            self._write_entries(step, projected)
        if self._role.layer == step.cache.cut:
            step.passed("bridge")
        return pool_PD

    def _write_entries(self, step: Step, projected: list[Tensor]) -> None:
        """Main entries and index keys of the groups that the step completes."""
        assert self._compressor is not None
        assert self._index_keys is not None
        plan = step.groups(self._role.ratio)
        entries = step.cache.sources[self._role.layer]
        latents_GD = self._compressor.latents(step.operations, projected, plan, entries.open)
        step.shared.index_keys = {}
        if plan.written.shape[0] == 0:
            return
        angles = step.group_angles(self._role.ratio)
        keys = self._index_keys(step.operations, latents_GD, angles)
        rotate_(latents_GD, angles)
        entries.main[plan.entries] = encode(step.operations, self._records.main, latents_GD[plan.written])
        entries.index[plan.entries] = encode(step.operations, self._records.index, keys[plan.written])


class Attention:
    """`write` makes a layer's keys, `mix` its output; a call does both."""

    def __init__(
        self,
        config: DeepseekConfig,
        role: LayerRole,
        source: TensorSource,
        operations: Operations,
        prefix: str,
    ) -> None:
        self._role, self._scale = role, config.head_dim**-0.5
        self._sink_H = source.take(f"{prefix}.attn_sink", (config.num_attention_heads,))
        self._output = GroupedOutput(config, source, operations, prefix)
        self._indexer = Indexer(config, role) if role.owns_selection else None
        self._queries = Queries(config, source, operations, prefix, indexed=role.owns_selection)
        self.write = LayerKeys(config, role, source, operations, prefix).write

    def __call__(self, step: Step, x_TC: Tensor, view: View) -> Tensor:
        """[T, C], of a view that picks no rows."""
        return self.mix(step, x_TC, view, self.write(step, x_TC, view))

    def mix(self, step: Step, x_TC: Tensor, view: View, pool_PD: Tensor) -> Tensor:
        """[T, C] of the view's queries, whose rows x holds."""
        angles = step.angles(view.queries, self._role.ratio)
        rows = self._queries(step.operations, x_TC, angles)
        if self._indexer is not None:
            step.shared.selection = self._indexer.select(step, view.queries, rows)
        entries = [Entries(pool_PD, view.index, view.windows.first)]
        if self._role.ratio:
            assert step.shared.selection is not None
            entries.append(step.shared.selection.entries)
        q_THD = rows.q.view(x_TC.shape[0], self._sink_H.shape[0], -1)
        out_THD = attend(step.operations, q_THD, entries, self._sink_H, scale=self._scale, angles=angles)
        return self._output(step.operations, out_THD)


def store_window(step: Step, layer: int, windows: WindowPlan, kv_TD: Tensor) -> Tensor:
    """Rotated entries of the step's rows, into a layer's ring; the pool that the windows' index points into.

    The value that attention reads is the stored one, of the current row too.
    """
    record, ring = step.cache.records.window, step.cache.window_LF[layer]
    stored = encode(step.operations, record, kv_TD)
    if windows.in_ring:
        ring[windows.stored_ring] = stored
        return ring
    nothing = stored.new_zeros(1, stored.shape[1])
    pool_PD = decode(step.operations, record, windows.pool(ring, stored, nothing))
    ring[windows.stored_ring] = stored[windows.stored_rows]
    return pool_PD
