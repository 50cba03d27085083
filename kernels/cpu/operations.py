"""`Operations` on the C library. Tensors are contiguous float32 on the CPU."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.cpu.decoder import CpuDecoder
from kernels.cpu.fused import CpuFused
from kernels.cpu.library import CWeight, load
from kernels.cpu.packing import pack
from kernels.cpu.structures import FORMATS, c_paging, c_weight, check_range, check_weight, row_bytes
from kernels.operations import Decoder, DecoderStack, Profile, Rope, Rows, Weight

_LANES, _MAX_HEAD = 16, 512  # of the widest vectors, of one head


class CpuOperations:
    """Runs each operation in the C library on `threads` threads; the number of threads changes no bit.

    C reads the memory that it is given, so lengths and types are asserted at every call.
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
        assert not table.packed
        check_weight(table, table.columns)
        assert ids.dtype == torch.int64
        check_range(ids, table.rows)
        out = torch.empty(len(ids), table.columns)
        self._library.dockyard_gather(
            table.data.data_ptr(), row_bytes(table), FORMATS[table.format], ids.data_ptr(), len(ids),
            table.columns, out.data_ptr(),
        )  # fmt: skip
        return out

    def linear(self, x_MK: Tensor, weights: Sequence[Weight]) -> list[Tensor]:
        x_MK = x_MK.contiguous()
        m, k = x_MK.shape
        assert x_MK.dtype == torch.float32
        for weight in weights:
            check_weight(weight, k)
        outs = [torch.empty(m, weight.rows) for weight in weights]
        array = (CWeight * len(weights))(*map(c_weight, weights, outs))
        status = self._library.dockyard_linear(array, len(weights), x_MK.data_ptr(), m, k, self._threads)
        if status == -2:
            raise MemoryError("no memory for a product's buffers")
        if status != 0:
            raise ValueError(f"a product over {k} columns: the kernel takes multiples of 32 up to 16,384")
        return outs

    def rms_norm(self, x_MK: Tensor, weight_K: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x_MK)
        m, k = x_MK.shape
        assert x_MK.dtype == weight_K.dtype == torch.float32
        assert weight_K.shape == (k,)
        assert weight_K.is_contiguous()
        assert k % _LANES == 0
        self._library.dockyard_rms_norm(x_MK.data_ptr(), weight_K.data_ptr(), eps, m, k, out.data_ptr())
        return out

    def rope_(self, x_MHD: Tensor, rope: Rope, positions_M: Tensor) -> None:
        m, heads, d = x_MHD.shape
        assert rope.table.shape[1] == d
        assert positions_M.dtype == torch.int64
        assert len(positions_M) == m
        check_range(positions_M, len(rope.table))
        self._library.dockyard_rope(
            x_MHD.data_ptr(), rope.table.data_ptr(), positions_M.data_ptr(), m, heads, d
        )

    def silu_mul(self, gate_MK: Tensor, up_MK: Tensor) -> Tensor:
        assert gate_MK.shape == up_MK.shape
        assert gate_MK.numel() % _LANES == 0
        self._library.dockyard_silu_mul(gate_MK.data_ptr(), up_MK.data_ptr(), gate_MK.numel())
        return gate_MK

    def store_kv(self, cache: Tensor, rows: Rows, k_MGD: Tensor, v_MGD: Tensor) -> None:
        paging = c_paging(cache, rows, heads=k_MGD.shape[1])
        assert k_MGD.shape == v_MGD.shape == (len(rows.positions), *cache.shape[3:])
        self._library.dockyard_store_kv(
            ctypes.byref(paging), k_MGD.data_ptr(), v_MGD.data_ptr(), k_MGD.shape[0]
        )

    def paged_attention(self, q_MHD: Tensor, cache: Tensor, rows: Rows, scale: float) -> Tensor:
        out = torch.empty_like(q_MHD)
        paging = c_paging(cache, rows, heads=q_MHD.shape[1])
        m, heads, d = q_MHD.shape
        assert m == len(rows.positions)
        assert heads % cache.shape[3] == 0
        assert d == cache.shape[4]
        assert d % _LANES == 0
        assert d <= _MAX_HEAD
        status = self._library.dockyard_paged_attention(
            ctypes.byref(paging), q_MHD.data_ptr(), q_MHD.shape[0], scale, out.data_ptr(), self._threads
        )
        if status != 0:
            raise MemoryError("no memory for attention scores")
        return out

    def decoder(self, stack: DecoderStack) -> Decoder:
        return CpuDecoder(stack, self._library, self._threads)
