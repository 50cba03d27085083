"""Several streams as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

Item = TypeVar("Item")


async def merged(streams: Sequence[AsyncGenerator[Item]]) -> AsyncGenerator[Item]:
    """Items of all streams as they come, in order within each.

    What a stream raises ends the others and is raised. Closing this one, or cancelling its task, closes all.
    """
    inbox: asyncio.Queue[Item | BaseException | None] = asyncio.Queue(maxsize=len(streams))
    tasks = [asyncio.create_task(_drain(stream, inbox)) for stream in streams]
    try:
        left = len(tasks)
        while left:
            item = await inbox.get()
            if item is None:
                left -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _drain(stream: AsyncGenerator[Item], inbox: "asyncio.Queue[Item | BaseException | None]") -> None:
    try:
        async with aclosing(stream) as items:
            async for item in items:
                await inbox.put(item)
    except Exception as error:
        await inbox.put(error)
    else:
        await inbox.put(None)
