"""One softmax over window entries and selected entries, with a sink (section 2.5). The reference.

Shapes: T rows, H heads, D head size, S entries a row, P entries of a pool.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine import numerics

_GATHERED = 1 << 23  # float32 values gathered at a time: 32 MiB


@dataclass(frozen=True, slots=True)
class Entries:
    """Entries that rows read: `index_TS` points into the pool, whose row 0 is zero and means none."""

    pool: Tensor
    index: Tensor  # int64, of a width that depends on the model alone

    def gather(self, rows: slice) -> Tensor:
        index = self.index[rows]
        return self.pool.index_select(0, index.flatten()).view(*index.shape, -1)


def attend(q_THD: Tensor, entries: Sequence[Entries], sink_H: Tensor, scale: float) -> Tensor:
    """[T, H, D]: o_h = sum_s e^(l_s) v_s / (sum_s e^(l_s) + e^(sink_h)), l_s = scale q_h k_s, v_s = k_s.

    A row's shapes and order of sums depend on the index widths alone. Memory is bounded: rows go in chunks.
    """
    width = sum(e.index.shape[1] for e in entries)
    chunk = max(1, _GATHERED // (width * q_THD.shape[2]))
    out = torch.empty_like(q_THD)
    for start in range(0, q_THD.shape[0], chunk):
        rows = slice(start, start + chunk)
        keys_TSD = torch.cat([e.gather(rows) for e in entries], 1)
        absent_TS = torch.cat([e.index[rows] == 0 for e in entries], 1)
        logits = numerics.batched_product(q_THD[rows], keys_TSD.transpose(1, 2)).mul_(scale)
        logits.masked_fill_(absent_TS[:, None], -torch.inf)
        sinks = sink_H[None, :, None].expand(logits.shape[0], -1, 1)
        weights = numerics.softmax(torch.cat((logits, sinks), 2))[:, :, :-1]
        out[rows] = numerics.batched_product(weights.contiguous(), keys_TSD)
    return out
