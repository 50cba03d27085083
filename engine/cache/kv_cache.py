"""The tensor behind the block pool, and its entries as bytes for a hand-off."""

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.model.llama import LlamaModel
from protocol.handoff import KvPayload


class KvCache:
    """float32 [layers, blocks, 2, block, KV heads, channels]. Pages are touched when they are used."""

    def __init__(self, model: LlamaModel, num_blocks: int, block_tokens: int) -> None:
        self.data: Tensor = torch.empty(model.cache_shape(num_blocks, block_tokens))
        self.block_tokens = block_tokens

    def layout(self, num_positions: int) -> tuple[int, ...]:
        """Shape of the exported entries of one sequence."""
        layers, _, _, _, heads, channels = self.data.shape
        return (layers, 2, num_positions, heads, channels)

    def export(self, blocks: Sequence[int], num_positions: int) -> KvPayload:
        """A copy of a sequence's first entries as contiguous bytes in `layout` order."""
        gathered = self.data[:, list(blocks)].transpose(1, 2).flatten(2, 3)[:, :, :num_positions]
        return gathered.contiguous().view(torch.uint8).flatten().numpy()

    def import_(self, payload: KvPayload, blocks: Sequence[int], num_positions: int) -> None:
        """Write exported entries into `blocks`. The payload may be read-only shared memory."""
        entries = (
            torch.from_numpy(_writable_view(payload)).view(torch.float32).view(self.layout(num_positions))
        )  # pyright: ignore[reportUnknownMemberType]
        for index, block in enumerate(blocks):
            start = index * self.block_tokens
            part = entries[:, :, start : min(start + self.block_tokens, num_positions)]
            self.data[:, block, :, : part.shape[2]] = part


def payload_crc(payload: KvPayload) -> int:
    """CRC-32 of the bytes: tells a damaged hand-off, not a forged one."""
    return zlib.crc32(payload.data)


def _writable_view(payload: KvPayload) -> KvPayload:
    """The same memory without the read-only flag that torch warns about; it is only ever read."""
    return (
        payload
        if payload.flags.writeable
        else np.lib.stride_tricks.as_strided(payload, writeable=False).copy()
    )
