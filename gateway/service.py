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
        """Text of all choices as it comes, in any order between choices. Raises RequestFailed.

        The engine computes the prompt once; each choice has its own seed.
        """
        readers = {
            index: ChoiceReader(index, self.model.tokenizer, request, sampling)
            for index, sampling in enumerate(request.choices)
        }
        generating = self.client.generate(
            request.prompt_ids, request.choices[0], request.priority, request.arrived_ns, choices=len(readers)
        )
        async with aclosing(generating) as tokens:
            async for batch in tokens:
                delta = readers[batch.choice].push(batch)
                if delta is None:
                    continue
                if delta.result is not None:
                    self.client.give_up(batch)  # where a stop string has ended it, its engine would go on
                    del readers[batch.choice]
                yield delta
                if not readers:
                    return

    async def complete(self, request: ChatRequest) -> list[ChoiceResult]:
        """All choices, finished. Raises RequestFailed."""
        results: list[ChoiceResult] = []
        async with aclosing(self.deltas(request)) as deltas:
            async for delta in deltas:
                if delta.result is not None:
                    results.append(delta.result)
        return sorted(results, key=lambda result: result.index)
