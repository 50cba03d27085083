"""Weights, caches and rows as C reads them: it trusts addresses, lengths and types, so they are checked here.

A wrong operand is a fault of the caller; it is a ValueError that names it, and no assertion: C
would read or write foreign memory.
"""

import torch
from torch import Tensor

from kernels.cpu.library import CPaging, CWeight
from kernels.cpu.packing import GROUP_ROWS
from kernels.limits import BLOCK, MAX_COLUMNS
from kernels.operations import Rows, Weight
from kernels.whole_numbers import FORMATS as FORMATS_OF_BLOCKS

FORMATS = {"f32": 0, "q4_1": 3, "q8_0": 8, "bf16": 30, "mxfp4": 39, "mxfp8": 1000}
_TYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
_BLOCK_BYTES = {"f32": 128, "q4_1": 20, "q8_0": 34, "bf16": 64, "mxfp4": 17, "mxfp8": 33}  # of 32 weights


def require(holds: bool, message: str) -> None:
    """Raises ValueError. For what is checked once; a message of many parts costs more than the check."""
    if not holds:
        raise ValueError(message)


def check_tensor(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """The address of contiguous memory of that shape and type. Raises ValueError that names the operand."""
    if x.shape != shape or x.dtype is not dtype or not is_plain(x) or not x.is_contiguous():
        order = "" if x.is_contiguous() else ", not contiguous"
        raise ValueError(
            f"{name}: {x.dtype} {list(x.shape)}{order}{_kind(x)}; the kernel takes {dtype} {list(shape)}, "
            "contiguous"
        )
    return x.data_ptr()


def is_plain(x: Tensor) -> bool:
    """Values lie in this process's memory as they are: no other device, no sign that is yet to be turned."""
    return x.is_cpu and not x.is_neg() and x.layout is torch.strided


def _kind(x: Tensor) -> str:
    """What there is besides type and shape, of a tensor that is not plain."""
    if not x.is_cpu or x.layout is not torch.strided:
        return f", on {x.device}, {x.layout}"
    return ", a negative view" if x.is_neg() else ""


def check_rows(name: str, x: Tensor, *shape: int) -> int:
    """`check_tensor` of float32."""
    return check_tensor(name, x, shape, torch.float32)


def check_multiple(name: str, width: int, of: int) -> None:
    """Raises ValueError."""
    if width % of:
        raise ValueError(f"{name} is {width}; the kernel takes multiples of {of}")


def check_range(name: str, indices: Tensor, size: int) -> None:
    """Each is a place of a table of that size. Raises ValueError."""
    if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < size:
        raise ValueError(f"{name}: {int(indices.min())}..{int(indices.max())} are not all in 0..{size - 1}")


def check_status(status: int) -> None:
    """Of a call into C (deepseek.h). Raises MemoryError, ValueError."""
    if status == 0:
        return
    if status == -2:
        raise MemoryError("no memory for the buffers of a step")
    if status == -3:
        raise ValueError("activations are not numbers, or an index points outside its table")
    raise ValueError(
        f"widths that the kernels do not take: columns are multiples of {BLOCK} up to {MAX_COLUMNS}"
    )


def check_weight(weight: Weight, columns: int, name: str = "weight") -> None:
    """The memory behind a weight is as large as its numbers say. Raises ValueError."""
    if weight.columns != columns:
        raise ValueError(f"{name}: {weight.columns} columns, the rows have {columns}")
    require(weight.format in FORMATS, f"{name}: no format {weight.format}")
    if weight.packed and weight.format in _TYPES:
        raise ValueError(f"{name}: {weight.format} has no packed form")
    if not weight.packed and weight.format in FORMATS_OF_BLOCKS:
        raise ValueError(f"{name}: {weight.format} is multiplied packed; prepare it")
    group, data = _group(weight), weight.data
    width = columns * _BLOCK_BYTES[weight.format] * group // (BLOCK * data.element_size())
    dtype = _TYPES.get(weight.format, torch.uint8)
    check_tensor(name, data, (-(-weight.rows // group), width), dtype)


def row_bytes(weight: Weight) -> int:
    """Of one row; packed, its share of a group."""
    return weight.data.shape[1] * weight.data.element_size() // _group(weight)


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
    sequences, width = rows.tables.shape
    positions = (len(rows.positions),)
    addresses = (
        check_rows("cache", cache, num_blocks, 2, block, kv_heads, d),
        check_tensor("tables", rows.tables, (sequences, width), torch.int32),
        check_tensor("sequences", rows.sequences, positions, torch.int64),
        check_tensor("positions", rows.positions, positions, torch.int64),
    )
    check_range("positions", rows.positions, width * block)
    check_range("sequences", rows.sequences, sequences)
    check_range("tables", rows.tables, num_blocks)
    return CPaging(*addresses, width, block, kv_heads, heads, d)


def _group(weight: Weight) -> int:
    return GROUP_ROWS if weight.packed else 1
