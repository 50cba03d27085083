"""The tensor behind the block pool, and its entries as bytes for a hand-off."""

import zlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.handoff import KvPayload, StateLayout


class KvCache:
    """float32 [layers, blocks, 2, block, KV heads, channels]. Pages are touched when they are used."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.data: Tensor = torch.empty(shape)
        self.block_tokens = shape[3]
        self._array: NDArray[np.float32] = self.data.numpy()  # the same memory

    @property
    def block_bytes(self) -> int:
        return self._array[:, 0].nbytes

    def layout(self, num_positions: int) -> StateLayout:
        """One part: the entries of one sequence, layer by layer, keys before values."""
        layers, _, _, _, heads, channels = self.data.shape
        return (("kv", layers * 2 * num_positions, heads * channels * 4),)

    def export(self, blocks: Sequence[int], num_positions: int) -> KvPayload:
        """A copy of a sequence's first entries as contiguous bytes in `layout` order."""
        entries = np.empty(self._shape(num_positions), np.float32)
        for block, positions in self._spans(blocks, num_positions):
            entries[:, :, positions] = self._array[:, block, :, : positions.stop - positions.start]
        return entries.view(np.uint8).reshape(-1)

    def import_(self, payload: KvPayload, blocks: Sequence[int], num_positions: int) -> None:
        """Write exported entries into `blocks`. The payload may be read-only shared memory."""
        entries = payload.view(np.float32).reshape(self._shape(num_positions))
        for block, positions in self._spans(blocks, num_positions):
            self._array[:, block, :, : positions.stop - positions.start] = entries[:, :, positions]

    def _shape(self, num_positions: int) -> tuple[int, ...]:
        layers, _, _, _, heads, channels = self.data.shape
        return (layers, 2, num_positions, heads, channels)

    def _spans(self, blocks: Sequence[int], num_positions: int) -> Iterator[tuple[int, slice]]:
        """Each block that holds some of the positions, and which. Blocks past them are left out."""
        for block, start in zip(blocks, range(0, num_positions, self.block_tokens), strict=False):
            yield block, slice(start, min(start + self.block_tokens, num_positions))


def payload_crc(payload: KvPayload) -> int:
    """CRC-32 of the bytes: tells a damaged hand-off, not a forged one."""
    return zlib.crc32(payload.data)
