"""The indexer (section 2.4): which compressed entries each row attends to.

Shapes: T rows, N visible groups, K selected groups, I index heads, J index head size, D channels of a latent.
Where operations have scores or selections in one call, they run; what is here is the reference.
score(p, j) = sum_h a_h relu(q_h . k_j); a = (x weights_proj) I^-1/2 J^-1/2; a group is visible when it ended
at or before p.
"""

from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from engine import numerics
from engine.model.deepseek.candidates import candidate_blocks, restrict_
from engine.model.deepseek.core_attention import Entries, reads_caches
from engine.model.deepseek.norm import RmsNorm
from engine.model.deepseek.records import decode, encode
from engine.model.deepseek.roles import LayerRole
from engine.model.deepseek.rope import Angles, rotate_
from engine.model.deepseek.rows import Rows
from engine.model.deepseek.shape import TextShape
from engine.model.deepseek.step import KeyRows, Selection, Step
from engine.model.tensor_source import TensorSource
from engine.numerics import Dense
from kernels.fused import LANES, QueryRows
from kernels.operations import Operations

_SCORES = 1 << 22  # float32 head scores at a time: 16 MiB, or one row's
_DIRECT = 1 << 12  # selected entries that are decoded one by one, repeated or not


class IndexKeys:
    """k_j = RMSNorm(L_j wk), rotated at the group's position; L_j is the latent before its rotation."""

    def __init__(self, config: TextShape, source: TensorSource, prefix: str) -> None:
        width = config.index_head_dim
        self._projection = Dense.of(source.take(f"{prefix}.wk.weight", (width, config.head_dim)))
        self._norm = RmsNorm.take(source, f"{prefix}.k_norm", width, config.rms_norm_eps)

    def __call__(self, operations: Operations, latents_GD: Tensor, angles: Angles) -> Tensor:
        keys = self._norm(operations, numerics.linear(operations, latents_GD, (self._projection,))[0])
        rotate_(keys, angles)
        return keys


class Indexer:
    """Of an index source; its queries and their weights run with the attention's own projections."""

    def __init__(self, config: TextShape, role: LayerRole) -> None:
        self._role, self._heads = role, config.index_n_heads
        self._k, self._blocks, self._size = (
            config.index_topk, config.candidate_topk_blocks, config.candidate_block_size,
        )  # fmt: skip

    def select(self, step: Step, rows: Rows, queries: QueryRows) -> Selection:
        """The K best visible groups of each row, all where fewer are visible, and their decoded entries."""
        assert queries.index_q is not None
        assert queries.head_weights is not None
        record = step.cache.records.index
        q_TIJ = queries.index_q.view(len(rows), self._heads, -1)
        q_TIJ = decode(step.operations, record, encode(step.operations, record, q_TIJ))
        chosen = [
            self._select_one(step, rows, sequence, q_TIJ[part], queries.head_weights[part])
            for sequence in range(len(rows.sequences))
            for part in [rows.row_slice(sequence)]
        ]
        groups_TK = _filled_up(chosen, self._k)
        if step.observer is not None:
            blocks = step.shared.candidates if self._role.makes_candidates else {}
            step.observer.selected(self._role.layer, groups_TK, blocks, rows)
        return Selection(groups_TK, self._entries(step, rows, groups_TK))

    def _select_one(self, step: Step, rows: Rows, sequence: int, q_TIJ: Tensor, a_TI: Tensor) -> Tensor:
        """Of one sequence; int64 [T, min(K, N)]."""
        ratio, own = self._role.ratio, rows.sequences[sequence]
        count = own.stop // ratio
        visible_T = torch.div(rows.positions_T[rows.row_slice(sequence)] + 1, ratio, rounding_mode="floor")
        blocks = step.shared.candidates.get(own.slot) if self._role.uses_candidates else None
        makes = self._role.makes_candidates and self._blocks * self._size < count
        if count <= self._k and blocks is None and not makes:  # every visible group is chosen
            groups = torch.arange(count).expand(q_TIJ.shape[0], count)
            return groups.masked_fill(groups >= visible_T[:, None], -1)
        keys = self._keys(step, rows, sequence)
        chosen: list[Tensor] = []
        made: list[Tensor] = []
        chunk = max(1, _SCORES // (count * self._heads))
        for start in range(0, q_TIJ.shape[0], chunk):
            part = slice(start, start + chunk)
            scores = index_scores(step.operations, q_TIJ[part], a_TI[part], keys, visible_T[part])
            if makes:
                made.append(candidate_blocks(scores, visible_T[part], self._size, self._blocks))
            if blocks is not None:
                restrict_(scores, blocks[part], self._size)
            chosen.append(numerics.top_k(scores, self._k, step.operations))
        if makes:
            step.shared.candidates[own.slot] = torch.cat(made)
        return chosen[0] if len(chosen) == 1 else torch.cat(chosen)

    def _keys(self, step: Step, rows: Rows, sequence: int) -> KeyRows:
        """Of a sequence's groups, decoded once a step for all index sources of a kv source."""
        slot, known, record = rows.sequences[sequence].slot, step.shared.index_keys, step.cache.records.index
        if slot not in known:
            stored = step.cache.sources[self._role.kv_source].index
            entries = rows.visible_entries(sequence, self._role.ratio)
            if reads_caches(step.operations, record):
                known[slot] = KeyRows(stored, entries)
            else:
                known[slot] = KeyRows(
                    decode(step.operations, record, stored[entries]), torch.arange(len(entries))
                )
        return known[slot]

    def _entries(self, step: Step, rows: Rows, groups_TK: Tensor) -> Entries:
        """The chosen main entries, decoded; each once where there are many."""
        present_TK = groups_TK >= 0
        flat_TK = rows.entries_of(groups_TK.clamp(min=0), self._role.ratio)
        stored = step.cache.sources[self._role.kv_source].main
        if reads_caches(step.operations, step.cache.records.main):
            return Entries(stored, flat_TK.masked_fill_(~present_TK, -1), first=0)
        if groups_TK.numel() <= _DIRECT:
            chosen, index = flat_TK.flatten(), torch.arange(groups_TK.numel()).view(groups_TK.shape)
        else:
            chosen, index = _distinct(flat_TK)
        values = decode(step.operations, step.cache.records.main, stored[chosen])
        pool = torch.cat((values.new_zeros(1, values.shape[1]), values))
        return Entries(pool, torch.where(present_TK, index + 1, 0))


def _filled_up(chosen: list[Tensor], k: int) -> Tensor:
    """The parts below each other, each with -1 up to k columns."""
    parts = [F.pad(part, (0, k - part.shape[1]), value=-1) if part.shape[1] < k else part for part in chosen]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _distinct(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct ids, ascending, and where among them each id is."""
    found = torch.unique(ids, return_inverse=True)  # pyright: ignore
    return cast("tuple[Tensor, Tensor]", found)


def index_scores(
    operations: Operations, q_TIJ: Tensor, a_TI: Tensor, keys: KeyRows, visible_T: Tensor
) -> Tensor:
    """[T, N] float32; -inf for groups that a row does not see yet."""
    if operations.fused is not None and q_TIJ.shape[2] % LANES == 0:
        return operations.fused.index_scores(q_TIJ, a_TI, keys.pool, keys.rows, visible_T)
    products = numerics.dot_products(operations, q_TIJ.flatten(0, 1), keys.pool[keys.rows]).relu_()
    weighted = products.view(*a_TI.shape, -1).mul_(a_TI[:, :, None])
    scores = numerics.tree_sum(weighted, 1)
    return scores.masked_fill_(torch.arange(len(keys.rows)) >= visible_T[:, None], -torch.inf)
