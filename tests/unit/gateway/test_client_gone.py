"""Work for a client and the watch over its connection end together, whichever ends first and however."""

import asyncio
from typing import Any, cast

import pytest
from fastapi import Request

from gateway.answering import unless_gone


class Client:
    """A connection that hangs up when told to."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def fail(error: Exception) -> int:
    await asyncio.sleep(0)
    raise error


async def stubborn(client: Client) -> int:
    """Fails when it is cancelled, as a connection that breaks meanwhile makes it."""
    client.gone.set()
    try:
        await asyncio.Event().wait()
    finally:
        raise OSError("broken meanwhile")


def others() -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks() - {asyncio.current_task()}


def test_an_error_leaves_no_task() -> None:
    async def main() -> None:
        with pytest.raises(ArithmeticError):
            await unless_gone(cast(Request, Client()), fail(ArithmeticError("of the work")))
        assert others() == set()

    asyncio.run(main())


def test_work_that_fails_on_its_cancellation_leaves_no_task() -> None:
    async def main() -> None:
        client = Client()
        assert await unless_gone(cast(Request, client), stubborn(client)) is None
        assert others() == set()

    asyncio.run(main())
