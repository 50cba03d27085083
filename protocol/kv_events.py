"""What an engine's caches hold, told to routers: events in the form that vLLM publishes them in.

A batch is msgpack of arrays; an event is tagged by its name. Published as three parts: topic, sequence number
(8 bytes, big-endian), payload. Keys of blocks are bytes.
"""

from typing import Any, Literal

import msgspec

Medium = Literal["GPU", "CPU", "STORAGE"]
"""Device, host memory and disk under the names that routers know."""


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Blocks, each the child of the one before; `parent_block_hash` is None at the start of a chain.

    Without tokens it tells that a tier has blocks, in no order. LoRA's fields are always None: readers of
    vLLM's arrays go by their places.
    """

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None
    medium: Medium | None
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    block_hashes: tuple[bytes, ...]
    medium: Medium | None


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Nothing that was told before holds any more."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KvEventBatch(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    ts: float  # Unix seconds
    events: tuple[KvEvent, ...]
    data_parallel_rank: int | None = None


def encode_batch(batch: KvEventBatch) -> bytes:
    return msgspec.msgpack.encode(batch)


def decode_batch(data: bytes) -> KvEventBatch:
    """Raises msgspec.DecodeError on bytes that are no batch."""
    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(KvEventBatch)
    return decoder.decode(data)


def message(topic: str, number: int, batch: KvEventBatch) -> tuple[bytes, bytes, bytes]:
    """The parts of a published message."""
    return topic.encode(), number.to_bytes(8, "big"), encode_batch(batch)
