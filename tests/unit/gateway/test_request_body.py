"""The body of a request: whole, or given up for a reason, and no task of it stays."""

import asyncio
from typing import Any

import pytest
from fastapi import Request
from starlette.requests import ClientDisconnect

from engine.errors import InvalidRequest
from gateway.body import BodyLate, ServerEnding, read_body
from gateway.config import GatewayConfig


def read(*messages: dict[str, Any], ends: bool = False, **config: float) -> bytes:
    """Reads a body that comes in these messages and no further; then the server ends, or not."""

    async def main() -> bytes:
        left, ending = list(messages), asyncio.Event()

        async def receive() -> dict[str, Any]:
            if not left:
                if ends:
                    ending.set()
                await asyncio.Event().wait()
            return left.pop(0)

        try:
            request = Request({"type": "http"}, receive)
            return await read_body(request, GatewayConfig.model_validate(config), ending)
        finally:
            assert asyncio.all_tasks() == {asyncio.current_task()}

    return asyncio.run(main())


def part(body: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def test_a_body_in_parts() -> None:
    assert read(part(b"ab"), part(b"c", more=False)) == b"abc"


def test_a_body_that_stops_is_late() -> None:
    with pytest.raises(BodyLate):
        read(part(b"ab"), body_timeout_s=0.05)


def test_a_server_that_ends_waits_for_no_body() -> None:
    with pytest.raises(ServerEnding):
        read(part(b"ab"), ends=True, body_timeout_s=600)


def test_a_client_that_hangs_up_in_its_body() -> None:
    with pytest.raises(ClientDisconnect):
        read(part(b"ab"), {"type": "http.disconnect"})


def test_a_body_that_is_too_long() -> None:
    with pytest.raises(InvalidRequest, match="exceeds 1024"):
        read(part(b"x" * 1025), max_body_bytes=1024)
