"""A completion's reply: its JSON, and its events. Source: OpenAI API reference, completions (legacy)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.chat_reply import ChoiceResult, ReplyHead, ToldIds, choice_ids, event, extension, usage
from gateway.choice_reader import Delta

_KIND = "text_completion"


@dataclass(frozen=True, slots=True)
class CompletionWriter:
    head: ReplyHead
    num_prompt: int

    def whole(self, results: Sequence[ChoiceResult]) -> bytes:
        reply = {
            "id": self.head.id,
            "object": _KIND,
            "created": self.head.created,
            "model": self.head.model,
            "choices": [_whole_choice(result) for result in results],
            "usage": usage(self.num_prompt, results),
            "dockyard": extension(self.head, results),
        }
        return msgspec.json.encode(reply)

    def begun(self, index: int) -> bytes:
        """A text begins with itself."""
        return b""

    def events(self, delta: Delta) -> Iterator[bytes]:
        """One event of a delta: its text, and how it has ended."""
        result = delta.result
        choice: dict[str, Any] = {
            "index": delta.index,
            "text": delta.text,
            "logprobs": _logprobs(delta.logprobs, delta.text_offset) if delta.logprobs else None,
            "finish_reason": None if result is None else result.finish_reason,
            **_ids(delta.ids),
        }
        if result is not None and result.stop_reason is not None:
            choice["stop_reason"] = result.stop_reason
        yield event(self.head, {"choices": [choice]}, _KIND)

    def usage(self, results: Sequence[ChoiceResult]) -> bytes:
        counts = {"choices": list[Any](), "usage": usage(self.num_prompt, results)}
        return event(self.head, {**counts, "dockyard": extension(self.head, results)}, _KIND)


def _whole_choice(result: ChoiceResult) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": result.index,
        "text": result.text,
        "logprobs": None if result.logprobs is None else _logprobs(result.logprobs, result.text_offset),
        "finish_reason": result.finish_reason,
        "stop_reason": result.stop_reason,
        **_ids(result.ids),
    }
    if result.prompt_logprobs is not None:
        choice["prompt_logprobs"] = result.prompt_logprobs
    return choice


def _ids(ids: ToldIds | None) -> dict[str, Any]:
    """A prompt's stand in its choices, as in vLLM: there may be several prompts."""
    prompt = {} if ids is None or ids.prompt is None else {"prompt_token_ids": ids.prompt}
    return {**choice_ids(ids), **prompt}


def _logprobs(entries: Sequence[dict[str, Any]], offset: int) -> dict[str, Any]:
    """As lists beside each other. `offset`: characters of the choice's tokens before these."""
    offsets: list[int] = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry["token"])
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [_top(entry) for entry in entries],
        "text_offset": offsets,
    }


def _top(entry: dict[str, Any]) -> dict[str, float]:
    """The likeliest ones, and the token's own, as in vLLM."""
    likeliest = {top["token"]: top["logprob"] for top in entry["top_logprobs"]}
    return {**likeliest, entry["token"]: entry["logprob"]}
