"""What a gateway serves, apart from HTTP: a model behind its workers."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from actors.token_client import TokenClient
from engine.chat.template import ChatTemplate
from engine.chat.tokenizer import ChatTokenizer
from gateway.chat_reply import ChoiceResult
from gateway.chat_request import ChatRequest
from gateway.choice_reader import ChoiceReader, Delta
from gateway.config import GatewayConfig


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The text side of a model; its tokens come from the workers."""

    name: str
    tokenizer: ChatTokenizer
    template: ChatTemplate
    max_positions: int


class ChatService:
    """Turns requests into text. Cancelling or closing an iterator aborts its choices on the workers."""

    def __init__(self, model: ServedModel, client: TokenClient, config: GatewayConfig) -> None:
        self.model, self.client, self.config = model, client, config
        self.ending = (
            asyncio.Event()
        )  # set when the server is told to end: bodies still on their way are given up

    async def deltas(self, request: ChatRequest) -> AsyncGenerator[Delta]:
        """Text of all choices as it comes, in any order between choices. Raises RequestFailed."""
        merged: asyncio.Queue[Delta | BaseException] = asyncio.Queue()
        begun = asyncio.Event()
        tasks = [
            asyncio.create_task(self._feed(request, index, begun, merged))
            for index in range(len(request.choices))
        ]
        open_choices = len(tasks)
        try:
            while open_choices:
                item = await merged.get()
                if isinstance(item, BaseException):
                    raise item
                open_choices -= item.result is not None
                yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def complete(self, request: ChatRequest) -> list[ChoiceResult]:
        """All choices, finished. Raises RequestFailed."""
        results: list[ChoiceResult] = []
        async with aclosing(self.deltas(request)) as deltas:
            async for delta in deltas:
                if delta.result is not None:
                    results.append(delta.result)
        return sorted(results, key=lambda result: result.index)

    async def _feed(
        self,
        request: ChatRequest,
        index: int,
        begun: asyncio.Event,
        merged: "asyncio.Queue[Delta | BaseException]",
    ) -> None:
        try:
            async with aclosing(self._choice(request, index, begun)) as deltas:
                async for delta in deltas:
                    merged.put_nowait(delta)
        except Exception as error:  # the reader of the queue raises it again
            merged.put_nowait(error)

    async def _choice(self, request: ChatRequest, index: int, begun: asyncio.Event) -> AsyncGenerator[Delta]:
        """The first choice sets `begun` once its prompt is computed; the others then find it in the cache."""
        if index:
            await begun.wait()
        sampling = request.choices[index]
        reader = ChoiceReader(index, self.model.tokenizer, request, sampling)
        generating = self.client.generate(request.prompt_ids, sampling, request.priority, request.arrived_ns)
        try:
            async with aclosing(generating) as tokens:
                async for batch in tokens:
                    begun.set()
                    delta = reader.push(batch)
                    if delta is not None:
                        yield delta
                        if delta.result is not None:
                            return
        finally:
            begun.set()
