"""Length-prefixed msgpack frames over asyncio streams."""

import asyncio
from collections.abc import Sequence

import msgspec

from protocol.wire import MAX_FRAME_BYTES, Failed, FromEngine, ToEngine

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(list[FromEngine])


class BrokenFrame(ConnectionError):
    """The other side sent what is no frame of ours; the connection is of no more use."""


def pack_to_engine(message: ToEngine) -> bytes:
    return _frame(_encoder.encode(message))


def pack_from_engine(messages: Sequence[FromEngine]) -> bytes:
    """All of a step's messages for one client: in one frame, or in as many as their bytes take.

    Instead of a message that fits in none its client is told so.
    """
    body = _encoder.encode(messages)
    if len(body) <= MAX_FRAME_BYTES:
        return _frame(body)
    if len(messages) == 1:
        fault = f"{len(body)} bytes in one message, more than {MAX_FRAME_BYTES}"
        return _frame(_encoder.encode([Failed(messages[0].request_id, "internal", fault)]))
    half = len(messages) // 2
    return pack_from_engine(messages[:half]) + pack_from_engine(messages[half:])


async def read_to_engine(reader: asyncio.StreamReader) -> ToEngine:
    """The next message. Raises IncompleteReadError at the end of the stream, BrokenFrame on nonsense."""
    try:
        return _to_engine.decode(await _read(reader))
    except msgspec.DecodeError as error:
        raise BrokenFrame(str(error)) from error


async def read_from_engine(reader: asyncio.StreamReader) -> list[FromEngine]:
    """The next batch. Raises as `read_to_engine` does."""
    try:
        return _from_engine.decode(await _read(reader))
    except msgspec.DecodeError as error:
        raise BrokenFrame(str(error)) from error


def _frame(body: bytes) -> bytes:
    if len(body) > MAX_FRAME_BYTES:
        raise BrokenFrame(f"a frame of {len(body)} bytes exceeds {MAX_FRAME_BYTES}")
    return len(body).to_bytes(4, "big") + body


async def _read(reader: asyncio.StreamReader) -> bytes:
    length = int.from_bytes(await reader.readexactly(4), "big")
    if length > MAX_FRAME_BYTES:
        raise BrokenFrame(f"a frame of {length} bytes exceeds {MAX_FRAME_BYTES}")
    return await reader.readexactly(length)
