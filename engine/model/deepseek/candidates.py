"""Hierarchical selection, its first level (section 2.4): blocks of positions that later layers choose among.

Shapes: T rows, N visible groups, B blocks of `size` groups.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from engine import numerics


def candidate_blocks(scores_TN: Tensor, visible_T: Tensor, size: int, k: int) -> Tensor:
    """int64 [T, min(k, B)]: each row's best blocks, ascending; -1 where there are no more.

    A block's score is the largest of its visible groups' (others are -inf). The block that holds the newest
    visible group is always among them.
    """
    padded = F.pad(scores_TN, (0, -scores_TN.shape[1] % size), value=-torch.inf)
    blocks_TB = padded.view(len(scores_TN), -1, size).amax(2)
    newest_T1 = torch.div((visible_T - 1).clamp(min=0), size, rounding_mode="floor")[:, None]
    pinned_T1 = torch.where(visible_T > 0, torch.inf, -torch.inf)[:, None]
    return numerics.top_k(blocks_TB.scatter(1, newest_T1, pinned_T1), k)


def restrict_(scores_TN: Tensor, blocks_TB: Tensor, size: int) -> None:
    """Scores outside a row's candidate blocks become -inf, in place."""
    count = scores_TN.shape[1]
    num_blocks = -(-count // size)
    outside = torch.ones(len(scores_TN), num_blocks + 1, dtype=torch.bool)
    outside = outside.scatter(1, torch.where(blocks_TB < 0, num_blocks, blocks_TB), False)
    scores_TN.masked_fill_(outside[:, :num_blocks].repeat_interleave(size, 1)[:, :count], -torch.inf)
