"""Reads what an endpoint answers: a chat completion, or an error. The endpoint is not trusted.

Source: OpenAI API reference, chat completions. `dockyard` is the gateway's own field: where the time went.
"""

import json
import os
import re
from typing import Annotated, Literal, cast

import msgspec

from protocol.errors import DockyardError, InvalidInput
from teams.model_call import Completion, ModelPhase, Phase

MAX_REPLY_BYTES = 16 << 20  # some million tokens, with room for what an endpoint adds
_MAX_REASON_CHARS = 300

# Two processes of one host read the same clock; a span further outside the call than this is another host's.
_CLOCK_TOLERANCE_NS = 5_000_000
_SURROGATE = re.compile(r"[\ud800-\udfff]")

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]  # what SQLite and JSON can carry
_Time = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class ModelError(DockyardError):
    """The endpoint refused, failed, could not be reached or made no sense. Nothing was retried."""


class ModelRefusedError(ModelError, InvalidInput):
    """The endpoint says that the request itself is wrong: asked again, it would refuse again."""


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message


class _Usage(msgspec.Struct):
    prompt_tokens: _Count = 0
    completion_tokens: _Count = 0


class _Span(msgspec.Struct):
    kind: ModelPhase
    start_ns: _Time
    end_ns: _Time


class _Ledger(msgspec.Struct):
    timeline: list[_Span] = []
    request_id: str = ""


class _Reply(msgspec.Struct):
    # The endpoint may be newer than this client: keys it adds are no reason to fail.
    choices: list[_Choice]
    id: str | None = None
    usage: _Usage | None = None
    dockyard: _Ledger | None = None


class _Reason(msgspec.Struct):
    message: str


class _Failure(msgspec.Struct):
    error: _Reason | str


def completion_of(body: bytes, start_ns: int, end_ns: int) -> Completion:
    """Reads the reply to a call that began at `start_ns` and had its answer by `end_ns`.

    Halves of surrogates in it become U+FFFD: no file and no screen takes them. Raises `ModelError` for what
    is no chat completion, and for one without a choice.
    """
    try:
        # The standard parser, since msgspec's own refuses a reply for half a surrogate in its text.
        reply = msgspec.convert(json.loads(body), _Reply)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ModelError(f"the reply is no chat completion: {_clipped(str(error))}") from error
    if not reply.choices:
        raise ModelError("the endpoint's reply holds no choice")
    timeline = _timeline(reply.dockyard, start_ns, end_ns)
    usage = reply.usage or _Usage()
    request_id = (reply.dockyard and reply.dockyard.request_id) or reply.id or ""
    return Completion(
        text=_whole(reply.choices[0].message.content or ""),
        timeline=timeline,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        request_id=_whole(request_id),
    )


def failure_text(status: int, body: bytes) -> str:
    """What an error reply says, in a line that begins with its status."""
    try:
        said = msgspec.json.decode(body, type=_Failure).error
        text = said if isinstance(said, str) else said.message
    except (msgspec.MsgspecError, ValueError, RecursionError):
        text = body[: 4 * _MAX_REASON_CHARS].decode(errors="replace")
    return f"HTTP {status}: {_clipped(text)}".rstrip(": ")


def connect_failure(error: Exception, url: str) -> str:
    """Why no answer came, in the system's own words where it has some: `connection refused: URL`."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno and cause.strerror:
            # asyncio puts a sentence of its own in the place of the system's; names have negative numbers.
            said = os.strerror(cause.errno) if cause.errno > 0 else cause.strerror
            return f"{said.lower()}: {url}"
        cause = _cause(cause)
    return f"{str(error) or type(error).__name__}: {url}"


def _cause(error: BaseException) -> BaseException | None:
    if isinstance(error, BaseExceptionGroup):  # a name with several addresses
        return cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error.__cause__ or error.__context__


def _timeline(ledger: _Ledger | None, start_ns: int, end_ns: int) -> tuple[Phase, ...]:
    measured: Literal["gateway", "client"] = "gateway"
    spans = sorted(ledger.timeline, key=lambda span: (span.start_ns, span.end_ns)) if ledger else []
    same_clock = all(
        start_ns - _CLOCK_TOLERANCE_NS <= span.start_ns <= span.end_ns <= end_ns + _CLOCK_TOLERANCE_NS
        for span in spans
    )
    if not spans or not same_clock:
        return (Phase("model.decode", start_ns, end_ns, "client"),)

    def inside(at_ns: int) -> int:
        return min(max(at_ns, start_ns), end_ns)

    return tuple(Phase(span.kind, inside(span.start_ns), inside(span.end_ns), measured) for span in spans)


def _whole(text: str) -> str:
    return _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text)


def _clipped(text: str) -> str:
    line = " ".join(_whole(text).split())
    return line if len(line) <= _MAX_REASON_CHARS else f"{line[: _MAX_REASON_CHARS - 1]}…"
