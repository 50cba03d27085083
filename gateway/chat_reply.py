"""Chat completion replies: the JSON of a whole one, and the server-sent events of a stream.

`dockyard.timeline` in the reply says where the request's time went; it is what puts the model's intervals
into a team's event log.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.chat.tool_calls import TextCall
from protocol.wire import Tokens


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    """One finished choice."""

    index: int
    text: str
    finish_reason: str
    num_tokens: int
    last: Tokens
    calls: tuple[TextCall, ...] = ()
    logprobs: tuple[dict[str, Any], ...] | None = None  # an entry a token, as the API has them
    stop_reason: str | int | None = None  # vLLM's: the stop string, or the stop token's id
    prompt_logprobs: tuple[dict[str, Any] | None, ...] | None = None  # vLLM's, on a prompt's first choice
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What every reply and chunk of one request repeats."""

    id: str
    created: int
    model: str


def whole(head: ReplyHead, num_prompt: int, results: Sequence[ChoiceResult]) -> bytes:
    choices = [
        {
            "index": result.index,
            "message": _message(result),
            "finish_reason": result.finish_reason,
            "stop_reason": result.stop_reason,
            "logprobs": _logprobs(result.logprobs),
        }
        for result in results
    ]
    told = next((r.prompt_logprobs for r in results if r.prompt_logprobs is not None), None)
    more = {} if told is None else {"prompt_logprobs": told}
    return msgspec.json.encode(
        {
            **more,
            "id": head.id,
            "object": "chat.completion",
            "created": head.created,
            "model": head.model,
            "choices": choices,
            "usage": usage(num_prompt, results),
            "dockyard": extension(head, results),
        }
    )


def chunk(
    head: ReplyHead,
    index: int,
    delta: dict[str, Any],
    *,
    result: ChoiceResult | None = None,
    logprobs: Sequence[dict[str, Any]] | None = None,
) -> bytes:
    """One event of a stream. `result`: of a choice that ends with it."""
    reason = None if result is None else result.finish_reason
    choice = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": _logprobs(logprobs)}
    if result is not None and result.stop_reason is not None:
        choice["stop_reason"] = result.stop_reason
    return event(head, {"choices": [choice]})


def call_entry(call: TextCall) -> dict[str, Any]:
    """A tool call as a message has it."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _message(result: ChoiceResult) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": result.text}
    if result.reasoning:
        message["reasoning_content"] = result.reasoning
    if result.calls:
        message["content"] = result.text or None
        message["tool_calls"] = [call_entry(call) for call in result.calls]
    return message


def _logprobs(entries: Sequence[dict[str, Any]] | None) -> dict[str, Any] | None:
    return None if entries is None else {"content": entries, "refusal": None}


def usage_chunk(head: ReplyHead, num_prompt: int, results: Sequence[ChoiceResult]) -> bytes:
    """The last event before `[DONE]` where the client asked for usage."""
    counts = {"choices": list[Any](), "usage": usage(num_prompt, results)}
    return event(head, {**counts, "dockyard": extension(head, results)})


DONE = b"data: [DONE]\n\n"


def failure_chunk(error: dict[str, Any]) -> bytes:
    """An error in the middle of a stream; the stream ends after it, without a normal finish."""
    return b"data: " + msgspec.json.encode({"error": error}) + b"\n\n"


def usage(num_prompt: int, results: Sequence[ChoiceResult]) -> dict[str, Any]:
    completion = sum(result.num_tokens for result in results)
    cached: dict[str, int] = {}  # of each prompt, which its choices share
    for last in (result.last for result in results):
        cached[last.request_id] = max(cached.get(last.request_id, 0), last.num_cached)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": completion,
        "total_tokens": num_prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
    }


def extension(head: ReplyHead, results: Sequence[ChoiceResult]) -> dict[str, Any]:
    """The timeline of the choice that ended last."""
    slowest = max(results, key=lambda result: result.last.produced_ns)
    return {"request_id": head.id, "timeline": timeline(slowest.last)}


def timeline(last: Tokens) -> list[dict[str, Any]]:
    """Consecutive stages of a request, in order; empty ones are left out."""
    adopted = last.adopted_ns or last.prefilled_ns
    bounds = [
        ("model.queue", last.arrived_ns, last.scheduled_ns),
        ("model.prefill", last.scheduled_ns, last.prefilled_ns),
        ("model.transfer", last.prefilled_ns, adopted),
        ("model.decode", adopted, last.produced_ns),
    ]
    return [{"kind": kind, "start_ns": start, "end_ns": end} for kind, start, end in bounds if end > start]


def event(head: ReplyHead, body: dict[str, Any], kind: str = "chat.completion.chunk") -> bytes:
    """One server-sent event of a stream."""
    common = {"id": head.id, "object": kind, "created": head.created, "model": head.model}
    return b"data: " + msgspec.json.encode({**common, **body}) + b"\n\n"
