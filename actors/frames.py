"""Length-prefixed msgpack frames over asyncio streams."""

import asyncio
from collections.abc import Sequence

import msgspec

from protocol.wire import MAX_FRAME_BYTES, Failed, FromEngine, ToEngine

_TOLD_CHARS = 2000  # of an error that cannot be told as it is
_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(list[FromEngine])


class BrokenFrame(ConnectionError):
    """The other side sent what is no frame of ours; the connection is of no more use."""


def pack_to_engine(message: ToEngine) -> bytes:
    return _frame(_encoder.encode(message))


def pack_from_engine(messages: Sequence[FromEngine]) -> bytes:
    """All of a step's messages for one client: in one frame, or in as many as their bytes take.

    Instead of a message that fits in none, or cannot be written, its client is told so.
    """
    try:
        body = _encoder.encode(messages)
    except (ValueError, TypeError, OverflowError) as error:  # half a surrogate pair, say
        fault = f"the message cannot be written: {error}"
    else:
        if len(body) <= MAX_FRAME_BYTES:
            return _frame(body)
        fault = f"{len(body)} bytes in one message, more than {MAX_FRAME_BYTES}"
    if len(messages) == 1:
        return _frame(_encoder.encode([_instead_of(messages[0], fault)]))
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


def _instead_of(message: FromEngine, fault: str) -> Failed:
    """What ends the request all the same: with its own code and parameter where it has failed already."""
    if not isinstance(message, Failed):
        return Failed(message.request_id, "internal", _written(fault))
    told = f"{message.message[:_TOLD_CHARS]} ({fault})"
    return Failed(
        message.request_id, message.code, _written(told), _written(message.parameter[:_TOLD_CHARS]),
        message.retry_after_s,
    )  # fmt: skip


def _written(text: str) -> str:
    """What has no UTF-8 as its escape."""
    return text.encode(errors="backslashreplace").decode()


def _frame(body: bytes) -> bytes:
    if len(body) > MAX_FRAME_BYTES:
        raise BrokenFrame(f"a frame of {len(body)} bytes exceeds {MAX_FRAME_BYTES}")
    return len(body).to_bytes(4, "big") + body


async def _read(reader: asyncio.StreamReader) -> bytes:
    length = int.from_bytes(await reader.readexactly(4), "big")
    if length > MAX_FRAME_BYTES:
        raise BrokenFrame(f"a frame of {length} bytes exceeds {MAX_FRAME_BYTES}")
    return await reader.readexactly(length)
