"""What a gateway serves, apart from HTTP: a model behind its workers."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from actors.token_client import TokenClient
from engine.chat.form import ChatForm
from engine.chat.tokenizer import ChatTokenizer
from gateway.chat_reply import ChoiceResult
from gateway.choice_reader import ChoiceReader, Delta
from gateway.config import GatewayConfig
from gateway.generation import Generation
from gateway.merging import merged


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The text side of a model; its tokens come from the workers."""

    name: str
    tokenizer: ChatTokenizer
    form: ChatForm | None  # None: a base model, whose texts go on
    max_positions: int
    opening: tuple[int, ...] = ()  # the tokens that it expects at the start of any text
    no_chat: str = ""  # why there is no form


class ChatService:
    """Turns requests into text. Cancelling or closing an iterator aborts its choices on the workers."""

    def __init__(self, model: ServedModel, client: TokenClient, config: GatewayConfig) -> None:
        self.model, self.client, self.config = model, client, config
        self.ending = (
            asyncio.Event()
        )  # set when the server is told to end: bodies still on their way are given up

    def deltas(self, generations: Sequence[Generation]) -> AsyncGenerator[Delta]:
        """Text of all choices as it comes, in any order between choices. Raises RequestFailed."""
        if len(generations) == 1:
            return self._deltas(generations[0])
        return merged([self._deltas(generation) for generation in generations])

    async def _deltas(self, generation: Generation) -> AsyncGenerator[Delta]:
        """The engine computes the prompt once; each choice has its own seed."""
        readers = {
            index: ChoiceReader(generation.first_choice + index, self.model.tokenizer, generation, sampling)
            for index, sampling in enumerate(generation.choices)
        }
        generating = self.client.generate(
            generation.prompt_ids, generation.choices[0], generation.priority, generation.arrived_ns,
            choices=len(readers), cache_salt=generation.cache_salt, slack_ms=generation.slack_ms,
            generated_ids=generation.generated_ids, resumed=generation.resumed,
        )  # fmt: skip
        async with aclosing(generating) as tokens:
            async for batch in tokens:
                delta = readers[batch.choice].push(batch)
                if not batch.token_ids:  # of what is told of a long prompt: others go on in between
                    await asyncio.sleep(0)
                if delta is None:
                    continue
                if delta.result is not None:
                    self.client.give_up(batch)  # where a stop string has ended it, its engine would go on
                    del readers[batch.choice]
                yield delta
                if not readers:
                    return

    async def complete(self, generations: Sequence[Generation]) -> list[ChoiceResult]:
        """All choices, finished. Raises RequestFailed."""
        results: list[ChoiceResult] = []
        async with aclosing(self.deltas(generations)) as deltas:
            async for delta in deltas:
                if delta.result is not None:
                    results.append(delta.result)
        return sorted(results, key=lambda result: result.index)
