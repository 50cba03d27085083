"""Chat completion replies: the JSON of a whole one, and the server-sent events of a stream.

`dockyard.timeline` in the reply says where the request's time went; it is what puts the model's intervals
into a team's event log.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.chat.tool_calls import TextCall
from protocol.stages import STAGES, StageNs
from protocol.wire import Tokens


@dataclass(frozen=True, slots=True)
class CallDelta:
    """New of the call with that number: its start, with id and name, or the next piece of its arguments."""

    index: int
    arguments: str
    id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class ToldIds:
    """vLLM's `return_token_ids`, and with a choice's first ones what else it takes to go on elsewhere."""

    tokens: tuple[int, ...]
    prompt: tuple[int, ...] | None = None
    resumed: tuple[int, ...] = ()  # where windows were run again behind a cached prefix


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
    prompt_logprobs: msgspec.Raw | None = None  # JSON: vLLM's, on a prompt's first choice
    reasoning: str = ""
    num_prompt: int = 0  # tokens of its prompt
    text_offset: int = 0  # characters of tokens that another request has given out before
    ids: ToldIds | None = None  # where the request asks for them


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What every reply and chunk of one request repeats."""

    id: str
    created: int
    model: str


def whole(head: ReplyHead, num_prompt: int, results: Sequence[ChoiceResult]) -> bytes:
    told = next((r.prompt_logprobs for r in results if r.prompt_logprobs is not None), None)
    more: dict[str, Any] = {} if told is None else {"prompt_logprobs": told}
    if results and results[0].ids is not None:
        more["prompt_token_ids"] = results[0].ids.prompt
    return msgspec.json.encode(
        {
            **more,
            "id": head.id,
            "object": "chat.completion",
            "created": head.created,
            "model": head.model,
            "choices": [_whole_choice(result) for result in results],
            "usage": usage(num_prompt, results),
            "dockyard": extension(head, results),
        }
    )


def _whole_choice(result: ChoiceResult) -> dict[str, Any]:
    return {
        "index": result.index,
        "message": _message(result),
        "finish_reason": result.finish_reason,
        "stop_reason": result.stop_reason,
        "logprobs": _logprobs(result.logprobs),
        **choice_ids(result.ids),
    }


def chunk(
    head: ReplyHead,
    index: int,
    delta: dict[str, Any],
    *,
    result: ChoiceResult | None = None,
    logprobs: Sequence[dict[str, Any]] | None = None,
    ids: ToldIds | None = None,
) -> bytes:
    """One event of a stream. `result`: of a choice that ends with it."""
    reason = None if result is None else result.finish_reason
    choice: dict[str, Any] = {
        "index": index,
        "delta": delta,
        "finish_reason": reason,
        "logprobs": _logprobs(logprobs),
        **choice_ids(ids),
    }
    if result is not None and result.stop_reason is not None:
        choice["stop_reason"] = result.stop_reason
    prompt = {} if ids is None or ids.prompt is None else {"prompt_token_ids": ids.prompt}
    return event(head, {"choices": [choice], **prompt})


def choice_ids(ids: ToldIds | None) -> dict[str, Any]:
    """What a choice tells of its tokens."""
    if ids is None:
        return {}
    return {"token_ids": ids.tokens, **({"resumed": ids.resumed} if ids.resumed else {})}


def call_entry(call: TextCall) -> dict[str, Any]:
    """A tool call as a message has it."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def call_delta(call: CallDelta) -> dict[str, Any]:
    """What is new of a tool call, as a chunk has it: its name and id come once."""
    if not call.id:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **call_entry(TextCall(call.id, call.name, call.arguments))}


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
    """The timeline of the choice that ended last, and its time by stage where the model has stages."""
    last = max(results, key=lambda result: result.last.produced_ns).last
    found = {"request_id": head.id, "timeline": timeline(last)}
    return found if last.stages is None else {**found, "stages_ms": stages_ms(last, last.stages)}


def stages_ms(last: Tokens, stages: StageNs) -> dict[str, float]:
    """How long it queued, and what its steps then spent in each stage."""
    queued_ns = last.scheduled_ns - last.arrived_ns
    return {"queue": queued_ns / 1e6, **{stage: stages.of(stage) / 1e6 for stage in STAGES}}


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
