"""Reads a request's body: bounded in bytes and in time, and given up when the server is to end."""

import asyncio

from fastapi import Request

from engine.errors import InvalidRequest
from gateway.config import GatewayConfig


class BodyLate(Exception):
    """The body was not whole in its time."""


class ServerEnding(Exception):
    """The server ends, and the body was not whole yet."""


async def read_body(request: Request, config: GatewayConfig, ending: asyncio.Event) -> bytes:
    """The whole body. Raises InvalidRequest for one that is too long, BodyLate, ServerEnding once `ending` is
    set, and ClientDisconnect."""
    reading = asyncio.create_task(_read(request, config.max_body_bytes))
    told = asyncio.create_task(ending.wait())
    try:
        await asyncio.wait(
            (reading, told), timeout=config.body_timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if reading.done():
            return reading.result()
        raise ServerEnding if told.done() else BodyLate
    finally:
        reading.cancel()
        told.cancel()
        await asyncio.gather(reading, told, return_exceptions=True)


async def _read(request: Request, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise InvalidRequest(f"the body exceeds {limit} bytes", parameter="body")
        parts.append(part)
    return b"".join(parts)
