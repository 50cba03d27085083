"""Texts for prompts, for callers who need no stream."""

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from engine.chat.text_stream import TextStream
from engine.chat.tokenizer import ChatTokenizer
from engine.errors import InvalidRequest
from engine.request import Request
from protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from engine.engine import Engine


def generate(
    engine: "Engine", prompts: str | Seq[str | Seq[int]], sampling: SamplingParams, tokenizer: ChatTokenizer
) -> list[str]:
    """`Engine.generate`."""
    if engine.config.role != "both":
        raise InvalidRequest(
            f"an engine in role {engine.config.role} makes no texts by itself", parameter="role",
            hint='make one with EngineConfig(role="both")',
        )  # fmt: skip
    if engine.has_work:
        raise InvalidRequest(
            f"{len(engine.requests)} other requests are here, and their tokens would be lost",
            parameter="prompts", hint="step until has_work is false, or add requests and step by yourself",
        )  # fmt: skip
    streams: dict[str, TextStream] = {}
    try:
        for index, prompt in enumerate(_several(prompts)):
            ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            request = Request(f"generate-{index}", tuple(ids), sampling)
            engine.add(request)
            streams[request.id] = TextStream(
                tokenizer, sampling.stop, include_stop=sampling.include_stop, min_tokens=sampling.min_tokens
            )
        while engine.has_work:
            _take_step(engine, streams)
    except BaseException:
        for request_id in streams:
            engine.abort(request_id)
        raise
    return [stream.text for stream in streams.values()]


def _several(prompts: str | Seq[str | Seq[int]]) -> Seq[str | Seq[int]]:
    """A lone text is one prompt, and not one for each of its letters."""
    if isinstance(prompts, str):
        return [prompts]
    if any(isinstance(each, int) for each in prompts):
        raise InvalidRequest(
            "prompts has token ids where a prompt is expected", parameter="prompts",
            hint="write [[1, 2, 3]] for one prompt of ids",
        )  # fmt: skip
    return prompts


def _take_step(engine: "Engine", streams: dict[str, TextStream]) -> None:
    """Raises what a request has failed with."""
    result = engine.step()
    if result.failed:
        raise result.failed[0][1]
    for output in result.tokens:
        stream = streams[output.request_id]
        stream.push(output.token_ids, final=output.finish_reason is not None)
        if stream.stopped and output.finish_reason is None:
            engine.abort(output.request_id)
