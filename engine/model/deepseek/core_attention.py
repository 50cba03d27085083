"""One softmax over window entries and selected entries, with a sink (section 2.5).

Where operations have it in one call, it runs; what is here is the reference.
Shapes: T rows, H heads, D head size, S entries a row, P entries of a pool.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine import numerics
from engine.model.deepseek.records import PlainRecord, Record
from engine.model.deepseek.rope import Angles, rotate_
from kernels.fused import LANES, EntrySource
from kernels.operations import Operations

_GATHERED = 1 << 23  # float32 values gathered at a time: 32 MiB
_PLACES = 16  # of which a row's number of entries is a multiple: softmax's vectors


@dataclass(frozen=True, slots=True)
class Entries:
    """Entries that rows read: `index` [T, S] points into the pool [P, D]; below `first` it means none.

    In a pool made for a step row 0 is zero, and means none; in a cache itself -1 does.
    """

    pool: Tensor
    index: Tensor  # int64, of a width that depends on the model alone
    first: int = 1


def reads_caches(operations: Operations, record: Record) -> bool:
    """Whether attention reads entries where a cache holds them, rather than from a pool made for the step."""
    return operations.fused is not None and isinstance(record, PlainRecord) and record.channels % LANES == 0


def attend(
    operations: Operations,
    q_THD: Tensor,
    entries: Sequence[Entries],
    sink_H: Tensor,
    *,
    scale: float,
    angles: Angles,
) -> Tensor:
    """[T, H, D]: o_h = sum_s e^(l_s) v_s / (sum_s e^(l_s) + e^(sink_h)), l_s = scale q_h k_s, v_s = k_s.

    The output is rotated back by `angles`.
    """
    if operations.fused is not None and q_THD.shape[2] % LANES == 0:
        sources = [EntrySource(e.pool, e.index, e.first) for e in entries]
        return operations.fused.attend(q_THD, sources, sink_H, scale, angles)
    out_THD = attend_composed(q_THD, entries, sink_H, scale)
    rotate_(out_THD, angles.inverse())
    return out_THD


def attend_composed(q_THD: Tensor, entries: Sequence[Entries], sink_H: Tensor, scale: float) -> Tensor:
    """`attend` before the rotation, of PyTorch's operations.

    A row's shapes and order of sums depend on the index widths alone. Memory is bounded: rows go in chunks.
    The sink is the weight of an entry that is zero.
    """
    assert all(e.first == 1 for e in entries)
    pool_PD, index_TS = _joined(entries)
    absent_TS = index_TS == 0
    chunk = max(1, _GATHERED // (index_TS.shape[1] * q_THD.shape[2]))
    parts: list[Tensor] = []
    for start in range(0, q_THD.shape[0], chunk):
        rows = slice(start, start + chunk)
        index = index_TS[rows]
        keys_TSD = pool_PD.index_select(0, index.flatten()).view(*index.shape, -1)
        logits = numerics.batched_product(q_THD[rows], keys_TSD.transpose(1, 2)).mul_(scale)
        logits.masked_fill_(absent_TS[rows, None], -torch.inf)
        logits[:, :, -1] = sink_H
        parts.append(numerics.batched_product(numerics.softmax(logits), keys_TSD))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _joined(entries: Sequence[Entries]) -> tuple[Tensor, Tensor]:
    """One pool and one index, with at least one more place for nothing: the sink's, the last."""
    pools, indices, before = [e.pool for e in entries], [entries[0].index], entries[0].pool.shape[0]
    for more in entries[1:]:
        indices.append(torch.where(more.index > 0, more.index + before, 0))
        before += more.pool.shape[0]
    width = sum(index.shape[1] for index in indices)
    indices.append(indices[0].new_zeros(indices[0].shape[0], _PLACES - width % _PLACES))
    return torch.cat(pools) if len(pools) > 1 else pools[0], torch.cat(indices, 1)
