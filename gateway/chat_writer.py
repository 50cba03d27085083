"""A chat completion's reply as the routes write it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gateway import chat_reply
from gateway.chat_reply import ChoiceResult, ReplyHead
from gateway.choice_reader import Delta


@dataclass(frozen=True, slots=True)
class ChatWriter:
    head: ReplyHead
    num_prompt: int

    def whole(self, results: Sequence[ChoiceResult]) -> bytes:
        return chat_reply.whole(self.head, self.num_prompt, results)

    def begun(self, index: int) -> bytes:
        """The first event of a choice."""
        return chat_reply.chunk(self.head, index, {"role": "assistant", "content": ""})

    def events(self, delta: Delta) -> Iterator[bytes]:
        """Reasoning, content, calls and the end, each in events of its own; what is told of tokens, once."""
        texts = {"reasoning_content": delta.reasoning, "content": delta.text}
        pieces: list[dict[str, Any]] = [{name: text} for name, text in texts.items() if text]
        logprobs, ids = delta.logprobs or None, delta.ids
        for piece in pieces or ([{"content": ""}] if logprobs or ids else []):
            yield chat_reply.chunk(self.head, delta.index, piece, logprobs=logprobs, ids=ids)
            logprobs = ids = None
        for call in delta.calls:
            yield chat_reply.chunk(self.head, delta.index, {"tool_calls": [chat_reply.call_delta(call)]})
        if delta.result is not None:
            yield chat_reply.chunk(self.head, delta.index, {}, result=delta.result)

    def usage(self, results: Sequence[ChoiceResult]) -> bytes:
        return chat_reply.usage_chunk(self.head, self.num_prompt, results)
