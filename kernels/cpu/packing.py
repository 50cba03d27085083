"""Quantised weights for the integer products: 32 rows side by side, no byte more than the file has.

A packed weight is a sequence of groups of 32 rows, a group a sequence of blocks of 32 columns. A block
holds the rows' scales as their format has them, for Q4_1 their minima too, and then their quants in words of
four bytes: word 0 of each row, word 1 of each row, … In a word the two middle bytes change places, so that
bytes 0 and 2 belong to neighbouring columns, and 1 and 3. The last group is filled up with rows of zeros.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.limits import BLOCK
from kernels.operations import Weight

GROUP_ROWS = 32
_HEADER_BYTES = {"q4_1": 4, "q8_0": 2, "mxfp4": 1, "mxfp8": 1}
_BYTE_ORDER = [0, 2, 1, 3]


def pack(weight: Weight) -> Weight:
    """A copy for the integer products; a weight without blocks (float32, bfloat16) is returned as it is."""
    if weight.format not in _HEADER_BYTES:
        return weight
    num_blocks, header = weight.columns // BLOCK, _HEADER_BYTES[weight.format]
    rows = F.pad(weight.data, (0, 0, 0, -weight.rows % GROUP_ROWS))
    blocks = rows.view(-1, GROUP_ROWS, num_blocks, rows.shape[1] // num_blocks)
    scales = _side_by_side(blocks[..., :header], torch.int16 if header > 1 else torch.uint8)
    words = blocks[..., header:].reshape(*blocks.shape[:3], -1, 4)[..., _BYTE_ORDER]
    quants = _side_by_side(words.flatten(3), torch.int32)
    data = torch.cat((scales, quants), -1).flatten(1)
    return Weight(data, weight.rows, weight.columns, weight.format, packed=True)


def _side_by_side(blocks: Tensor, word: torch.dtype) -> Tensor:
    """Bytes [groups, 32, blocks, n] as [groups, blocks, 32 n], the rows' words alternating."""
    words = blocks.contiguous().view(word).permute(0, 2, 3, 1)
    return words.contiguous().view(torch.uint8).flatten(2)
