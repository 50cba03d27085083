"""Single requests to a gateway: what the client saw, and what the reply says of it."""

import time
from dataclasses import dataclass

import httpx
import msgspec


class Span(msgspec.Struct):
    kind: str
    start_ns: int
    end_ns: int


class Ledger(msgspec.Struct):
    timeline: list[Span]


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class Reply(msgspec.Struct):
    """The parts of a chat completion that are looked at."""

    dockyard: Ledger
    usage: Usage


@dataclass(frozen=True, slots=True)
class Call:
    """One request. Milliseconds."""

    latency_ms: float  # for the client
    engine_ms: float  # from the gateway's submission to the last token
    transfer_ms: float
    decode_ms: float
    prompt_tokens: int
    completion_tokens: int


def call_of(reply: Reply, latency_ms: float) -> Call:
    """Splits a request's latency by the timeline in its reply."""
    spans = reply.dockyard.timeline
    engine_ns = max(span.end_ns for span in spans) - min(span.start_ns for span in spans)
    return Call(
        latency_ms=latency_ms,
        engine_ms=engine_ns / 1e6,
        transfer_ms=_spent_ms(spans, "model.transfer"),
        decode_ms=_spent_ms(spans, "model.decode"),
        prompt_tokens=reply.usage.prompt_tokens,
        completion_tokens=reply.usage.completion_tokens,
    )


async def call(http: httpx.AsyncClient, prompt: str, max_tokens: int) -> Call:
    """One greedy chat completion. Raises httpx's errors."""
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, "temperature": 0}
    start_s = time.perf_counter()
    answer = await http.post("/v1/chat/completions", json=body)
    latency_ms = (time.perf_counter() - start_s) * 1e3
    answer.raise_for_status()
    return call_of(msgspec.json.decode(answer.content, type=Reply), latency_ms)


def _spent_ms(spans: list[Span], kind: str) -> float:
    return sum(span.end_ns - span.start_ns for span in spans if span.kind == kind) / 1e6
