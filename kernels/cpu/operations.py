"""`Operations` on the C library. Tensors are contiguous float32 on the CPU."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.cpu.decoder import CpuDecoder
from kernels.cpu.fused import CpuFused
from kernels.cpu.library import CWeight, load
from kernels.cpu.packing import pack
from kernels.cpu.structures import (
    FORMATS,
    c_paging,
    c_weight,
    check_multiple,
    check_range,
    check_rows,
    check_status,
    check_tensor,
    check_weight,
    require,
    row_bytes,
)
from kernels.fused import LANES
from kernels.limits import BLOCK, MAX_COLUMNS, MAX_HEAD
from kernels.operations import (
    Decoder,
    DecoderStack,
    Profile,
    Rope,
    Rows,
    Weight,
)


class CpuOperations:
    """Runs each operation in the C library on `threads` threads; the number of threads changes no bit.

    C reads the memory that it is given, so lengths, types and order are checked at every call: ValueError.
    """

    name = "c"

    def __init__(
        self, threads: int, profile: Profile = "exact", *, library: ctypes.CDLL | None = None
    ) -> None:
        self.profile: Profile = profile
        self._library = library or load()
        self._threads = threads
        self.fused = CpuFused(self._library, threads)

    def prepare(self, weight: Weight) -> Weight:
        return pack(weight) if self.profile == "fast" else weight

    def gather(self, table: Weight, ids: Tensor) -> Tensor:
        require(not table.packed, "table: rows are gathered of an unprepared one")
        check_weight(table, table.columns, "table")
        m = len(ids)
        address = check_tensor("ids", ids, (m,), torch.int64)
        check_range("ids", ids, table.rows)
        out = torch.empty(m, table.columns)
        self._library.dockyard_gather(
            table.data.data_ptr(), row_bytes(table), FORMATS[table.format], address, m, table.columns,
            out.data_ptr(),
        )  # fmt: skip
        return out

    def linear(self, x_MK: Tensor, weights: Sequence[Weight]) -> list[Tensor]:
        x_MK = x_MK.contiguous()
        m, k = x_MK.shape
        x = check_rows("x", x_MK, m, k)
        for weight in weights:
            check_weight(weight, k)
        outs = [torch.empty(m, weight.rows) for weight in weights]
        array = (CWeight * len(weights))(*map(c_weight, weights, outs))
        status = self._library.dockyard_linear(array, len(weights), x, m, k, self._threads)
        if status == -1:
            raise ValueError(
                f"a product over {k} columns: the kernel takes multiples of {BLOCK} up to {MAX_COLUMNS:,}"
            )
        check_status(status)
        return outs

    def rms_norm(self, x_MK: Tensor, weight_K: Tensor, eps: float) -> Tensor:
        m, k = x_MK.shape
        check_multiple("channels", k, LANES)
        x, weight = check_rows("x", x_MK, m, k), check_rows("weight", weight_K, k)
        out = torch.empty(m, k)
        self._library.dockyard_rms_norm(x, weight, eps, m, k, out.data_ptr(), self._threads)
        return out

    def rope_(self, x_MHD: Tensor, rope: Rope, positions_M: Tensor) -> None:
        m, heads, d = x_MHD.shape
        num_positions = len(rope.table)
        check_multiple("head channels", d, 2)
        x, table = check_rows("x", x_MHD, m, heads, d), check_rows("rope.table", rope.table, num_positions, d)
        positions = check_tensor("positions", positions_M, (m,), torch.int64)
        check_range("positions", positions_M, num_positions)
        self._library.dockyard_rope(x, table, positions, m, heads, d, self._threads)

    def silu_mul(self, gate_MK: Tensor, up_MK: Tensor) -> Tensor:
        m, k = gate_MK.shape
        check_multiple("elements", m * k, LANES)
        gate, up = check_rows("gate", gate_MK, m, k), check_rows("up", up_MK, m, k)
        self._library.dockyard_silu_mul(gate, up, m * k, self._threads)
        return gate_MK

    def store_kv(self, cache: Tensor, rows: Rows, k_MGD: Tensor, v_MGD: Tensor) -> None:
        m, (kv_heads, d) = len(rows.positions), cache.shape[3:]
        k, v = check_rows("k", k_MGD, m, kv_heads, d), check_rows("v", v_MGD, m, kv_heads, d)
        paging = c_paging(cache, rows, heads=kv_heads)
        self._library.dockyard_store_kv(ctypes.byref(paging), k, v, m)

    def paged_attention(self, q_MHD: Tensor, cache: Tensor, rows: Rows, scale: float) -> Tensor:
        m, (kv_heads, d), heads = len(rows.positions), cache.shape[3:], q_MHD.shape[1]
        q, out = check_rows("q", q_MHD, m, heads, d), torch.empty(m, heads, d)
        check_multiple("heads", heads, kv_heads)
        check_multiple("head channels", d, LANES)
        require(d <= MAX_HEAD, "head channels are more than the kernel takes")
        paging = c_paging(cache, rows, heads)
        status = self._library.dockyard_paged_attention(
            ctypes.byref(paging), q, m, scale, out.data_ptr(), self._threads
        )
        if status != 0:
            raise MemoryError("no memory for attention scores")
        return out

    def decoder(self, stack: DecoderStack) -> Decoder:
        return CpuDecoder(stack, self._library, self._threads)
