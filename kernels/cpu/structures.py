"""Weights, caches and rows as C reads them: it trusts lengths and types, so they are asserted here."""

import torch
from torch import Tensor

from kernels.cpu.library import CPaging, CWeight
from kernels.cpu.packing import GROUP_ROWS
from kernels.operations import Rows, Weight
from kernels.whole_numbers import FORMATS as FORMATS_OF_BLOCKS

FORMATS = {"f32": 0, "q4_1": 3, "q8_0": 8, "bf16": 30, "mxfp4": 39, "mxfp8": 1000, "mxint8": 1001}
_TYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
_BLOCK_BYTES = {  # of 32 weights
    "f32": 128, "q4_1": 20, "q8_0": 34, "bf16": 64, "mxfp4": 17, "mxfp8": 33, "mxint8": 33
}  # fmt: skip


def check_weight(weight: Weight, columns: int) -> None:
    """The memory behind a weight is as large as its numbers say."""
    assert weight.columns == columns
    assert weight.packed or weight.format not in FORMATS_OF_BLOCKS
    group = _group(weight)
    assert len(weight.data) == -(-weight.rows // group)
    assert weight.data.dtype == _TYPES.get(weight.format, torch.uint8)
    bytes_of_32 = _BLOCK_BYTES[weight.format] * group
    assert weight.data.shape[1] * weight.data.element_size() * 32 == columns * bytes_of_32


def row_bytes(weight: Weight) -> int:
    """Of one row; packed, its share of a group."""
    return weight.data.stride(0) * weight.data.element_size() // _group(weight)


def c_weight(weight: Weight, out: Tensor | None) -> CWeight:
    """A checked weight whose product goes to `out`."""
    address = None if out is None else out.data_ptr()
    step = row_bytes(weight)
    return CWeight(
        weight.data.data_ptr(), address, weight.rows, step, FORMATS[weight.format], int(weight.packed)
    )


def c_paging(cache: Tensor, rows: Rows, heads: int) -> CPaging:
    """One layer's cache and the rows of a step. Every block that C will touch is one of the cache's."""
    num_blocks, _, block, kv_heads, d = cache.shape
    assert cache.dtype == torch.float32
    assert rows.tables.dtype == torch.int32
    assert rows.positions.dtype == rows.sequences.dtype == torch.int64
    assert len(rows.positions) == len(rows.sequences)
    check_range(rows.positions, rows.tables.shape[1] * block)
    check_range(rows.sequences, rows.tables.shape[0])
    check_range(rows.tables, num_blocks)
    return CPaging(
        cache.data_ptr(), rows.tables.data_ptr(), rows.sequences.data_ptr(), rows.positions.data_ptr(),
        rows.tables.shape[1], block, kv_heads, heads, d,
    )  # fmt: skip


def check_range(indices: Tensor, size: int) -> None:
    """Each is a place of a table of that size."""
    assert not indices.numel() or 0 <= int(indices.min()) <= int(indices.max()) < size


def _group(weight: Weight) -> int:
    return GROUP_ROWS if weight.packed else 1
