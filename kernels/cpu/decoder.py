"""All layers of a decoder as one call into the C library.

T rows (tokens) of a step, C channels, H query heads, G KV heads, D channels a head.
"""

import ctypes

from torch import Tensor

from kernels.cpu.library import CDecoder, CLayer
from kernels.cpu.structures import (
    c_paging,
    c_weight,
    check_multiple,
    check_range,
    check_rows,
    check_status,
    check_weight,
    require,
)
from kernels.fused import LANES
from kernels.limits import MAX_HEAD
from kernels.operations import DecoderLayer, DecoderStack, Rows, Weight

_NAMES = ("q", "k", "v", "output", "gate", "up", "down")


class CpuDecoder:
    """Structures that C reads at every step, made once; keeps the tensors behind them alive."""

    def __init__(self, stack: DecoderStack, library: ctypes.CDLL, threads: int) -> None:
        self._stack = stack
        self._library = library
        self._threads = threads
        self._channels = len(stack.layers[0].attention_norm)
        self._feed_forward = stack.layers[0].gate.rows
        d = stack.head_channels
        check_multiple("channels", self._channels, LANES)
        check_multiple("feed_forward", self._feed_forward, LANES)
        check_multiple("head channels", d, LANES)
        require(d <= MAX_HEAD, f"head channels are {d}; the kernel takes up to {MAX_HEAD}")
        table = check_rows("rope.table", stack.rope.table, len(stack.rope.table), d)
        self._layers = (CLayer * len(stack.layers))(*(self._layer(layer) for layer in stack.layers))
        self._decoder = CDecoder(
            ctypes.addressof(self._layers), table, len(stack.layers), self._channels,
            self._feed_forward, stack.norm_eps, d**-0.5,
        )  # fmt: skip

    def __call__(self, x_TC: Tensor, rows: Rows, cache: Tensor) -> Tensor:
        """Runs in place. `cache`: [layers, blocks, 2, block, G, D], contiguous."""
        first = self._stack.layers[0]
        d = self._stack.head_channels
        x = check_rows("x", x_TC, len(rows.positions), self._channels)
        check_rows("cache", cache, len(self._layers), *cache.shape[1:4], first.k.rows // d, d)
        check_range("positions", rows.positions, len(self._stack.rope.table))
        paging = c_paging(cache[0], rows, heads=first.q.rows // d)
        status = self._library.dockyard_decode(
            ctypes.byref(self._decoder), ctypes.byref(paging), cache.stride(0), x, len(x_TC),
            self._threads,
        )  # fmt: skip
        if status == -2:
            raise MemoryError(f"no memory for the buffers of {len(x_TC)} rows")
        check_status(status)
        return x_TC

    def _layer(self, layer: DecoderLayer) -> CLayer:
        c, f = self._channels, self._feed_forward
        q, kv = layer.q.rows, layer.k.rows
        norms = (
            check_rows("attention_norm", layer.attention_norm, c),
            check_rows("feed_forward_norm", layer.feed_forward_norm, c),
        )
        weights = (layer.q, layer.k, layer.v, layer.output, layer.gate, layer.up, layer.down)
        shapes = ((q, c), (kv, c), (kv, c), (c, q), (f, c), (f, c), (c, f))
        for weight, name, (rows, columns) in zip(weights, _NAMES, shapes, strict=True):
            require(weight.rows == rows, f"{name}: {weight.rows} rows, expected {rows}")
            check_weight(weight, columns, name)
        check_multiple("heads", q // self._stack.head_channels, kv // self._stack.head_channels)
        return CLayer(*norms, *(_without_output(w) for w in weights))


def _without_output(weight: Weight) -> object:
    return c_weight(weight, None)
