"""All layers of a decoder as one call into the C library.

T rows (tokens) of a step, C channels, H query heads, G KV heads, D channels a head.
"""

import ctypes

import torch
from torch import Tensor

from kernels.cpu.library import CDecoder, CLayer
from kernels.cpu.structures import c_paging, c_weight, check_range, check_weight
from kernels.operations import DecoderLayer, DecoderStack, Rows, Weight

_LANES, _MAX_HEAD = 16, 512  # of the widest vectors, of one head


class CpuDecoder:
    """Structures that C reads at every step, made once; keeps the tensors behind them alive."""

    def __init__(self, stack: DecoderStack, library: ctypes.CDLL, threads: int) -> None:
        self._stack = stack
        self._library = library
        self._threads = threads
        self._channels = len(stack.layers[0].attention_norm)
        self._feed_forward = stack.layers[0].gate.rows
        d = stack.head_channels
        assert self._channels % _LANES == self._feed_forward % _LANES == d % _LANES == 0
        assert d <= _MAX_HEAD
        assert stack.rope.table.shape[1] == d
        self._layers = (CLayer * len(stack.layers))(*(self._layer(layer) for layer in stack.layers))
        self._decoder = CDecoder(
            ctypes.addressof(self._layers), stack.rope.table.data_ptr(), len(stack.layers), self._channels,
            self._feed_forward, stack.norm_eps, d**-0.5,
        )  # fmt: skip

    def __call__(self, x_TC: Tensor, rows: Rows, cache: Tensor) -> Tensor:
        """Runs in place. `cache`: [layers, blocks, 2, block, G, D], contiguous."""
        first = self._stack.layers[0]
        d = self._stack.head_channels
        assert x_TC.shape == (len(rows.positions), self._channels)
        assert x_TC.dtype == torch.float32
        assert x_TC.is_contiguous()
        assert cache.is_contiguous()
        assert (cache.shape[0], *cache.shape[4:]) == (len(self._layers), first.k.rows // d, d)
        check_range(rows.positions, len(self._stack.rope.table))
        paging = c_paging(cache[0], rows, heads=first.q.rows // d)
        status = self._library.dockyard_decode(
            ctypes.byref(self._decoder), ctypes.byref(paging), cache.stride(0), x_TC.data_ptr(), len(x_TC),
            self._threads,
        )  # fmt: skip
        if status == -2:
            raise MemoryError(f"no memory for the buffers of {len(x_TC)} rows")
        assert status == 0, "widths that the products do not take"
        return x_TC

    def _layer(self, layer: DecoderLayer) -> CLayer:
        c, f = self._channels, self._feed_forward
        q, kv = layer.q.rows, layer.k.rows
        norms = (layer.attention_norm, layer.feed_forward_norm)
        for norm in norms:
            assert norm.shape == (c,)
            assert norm.dtype == torch.float32
            assert norm.is_contiguous()
        weights = (layer.q, layer.k, layer.v, layer.output, layer.gate, layer.up, layer.down)
        shapes = ((q, c), (kv, c), (kv, c), (c, q), (f, c), (f, c), (c, f))
        for weight, (rows, columns) in zip(weights, shapes, strict=True):
            assert weight.rows == rows
            check_weight(weight, columns)
        assert q % (kv // self._stack.head_channels) == 0
        return CLayer(*(norm.data_ptr() for norm in norms), *(_without_output(w) for w in weights))


def _without_output(weight: Weight) -> object:
    return c_weight(weight, None)
