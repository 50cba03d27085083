"""A chat completion request: parsed once and checked.

Unknown keys are ignored, since clients send many; those that would change the answer and are not done yet are
refused by name.

Source: OpenAI API reference, chat completions. `dockyard` is our extension: forced text for replays.

`model` is not looked at: the one model that is served answers to every name, since agents' side requests name
models that exist only elsewhere. The reply's `model` says which one has answered.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from engine.chat.prompt import encode_messages
from engine.chat.template import ChatTemplate
from engine.chat.tokenizer import ChatTokenizer
from engine.errors import InvalidRequest
from gateway.config import GatewayConfig
from protocol.sampling import SamplingParams

_STOP_CHARS = 512  # of one string: each token's text is searched for all of it


class TextPart(msgspec.Struct):
    type: str
    text: str = ""


# The roles of the API. A template may write others, and would write one of megabytes too.
Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class ChatMessage(msgspec.Struct):
    role: Role
    content: str | list[TextPart] | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class Extension(msgspec.Struct):
    """Ours. `forced_text`: run its tokens through the engine instead of choosing any; ordinary text only."""

    forced_text: str | None = None


class ChatBody(msgspec.Struct):
    messages: list[ChatMessage]
    model: str = ""
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    priority: int | None = None
    dockyard: Extension | None = None
    # Not done yet: see _NEUTRAL.
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    logprobs: Any = None
    top_logprobs: Any = None
    logit_bias: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    min_p: Any = None
    min_tokens: Any = None
    modalities: Any = None
    audio: Any = None


# What would change the answer, and is not done yet: the values that ask for nothing, beside null.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "audio": (),
}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What is left after parsing: prompt ids and one set of sampling parameters a choice."""

    prompt_ids: tuple[int, ...]
    choices: tuple[SamplingParams, ...]
    stream: bool
    include_usage: bool
    priority: int
    arrived_ns: int = 0  # when the gateway had its body; 0: when it is sent on


def parse_chat(body: bytes) -> ChatBody:
    """Raises InvalidRequest that names the field."""
    try:
        return msgspec.json.decode(body, type=ChatBody)
    except msgspec.ValidationError as error:
        raise InvalidRequest(_clipped(str(error)), parameter=_field_of(str(error))) from error
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}", parameter="body") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply", parameter="body") from error


def prepare_chat(
    body: ChatBody,
    template: ChatTemplate,
    tokenizer: ChatTokenizer,
    max_positions: int,
    config: GatewayConfig,
) -> ChatRequest:
    """Render, tokenise and check against the model's limits. Raises InvalidRequest.

    Blocks, for seconds where a message has megabytes and the model as many positions, and without bound in
    the template, which is a program of the model file: not for an event loop.
    """
    _check_done(body)
    _check_count(body.messages, max_positions)
    stops = _stops(body.stop)
    messages = [_message(m) for m in body.messages]
    _check_length("messages", sum(len(m["content"]) for m in messages), tokenizer, max_positions)
    prompt = encode_messages(messages, template, tokenizer)
    forced = _forced_ids(body, tokenizer, max_positions)
    room = max_positions - len(prompt)
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    needed = len(forced) or (1 if asked is None else asked)
    if room < needed:
        raise InvalidRequest(
            f"the model has {max_positions} positions; the prompt takes {len(prompt)}, the output {needed}",
            parameter="messages", hint="shorten the messages or lower max_tokens",
        )  # fmt: skip
    sampling = SamplingParams(
        max_tokens=_at_least(
            "max_tokens", min(config.default_max_tokens, room) if asked is None else asked, 1
        ),
        temperature=_within("temperature", 1.0 if body.temperature is None else body.temperature, 0.0, 2.0),
        top_p=_within("top_p", 1.0 if body.top_p is None else body.top_p, 1e-6, 1.0),
        top_k=int(_within("top_k", max(body.top_k or 0, 0), 0, 2**31)),  # -1 keeps all, as in vLLM
        # Without a seed each request draws its own noise, as clients that sample twice expect.
        seed=secrets.randbits(32) if body.seed is None else int(_within("seed", body.seed, -(2**62), 2**62)),
        stop=stops,
        forced_ids=forced,
    )
    count = _within("n", 1 if body.n is None else body.n, 1, config.max_choices)
    choices = tuple(replace(sampling, seed=sampling.seed + index) for index in range(int(count)))
    options = body.stream_options or StreamOptions()
    priority = int(_within("priority", body.priority or 0, -(2**31), 2**31))
    return ChatRequest(tuple(prompt), choices, bool(body.stream), options.include_usage, priority)


def _check_done(body: ChatBody) -> None:
    """Refuses what is not done yet: an answer that leaves it out would look like one that has it."""
    for name, neutral in _NEUTRAL.items():
        value = getattr(body, name)
        if value is not None and value not in neutral:
            raise InvalidRequest(
                f"{name} is not supported by this server yet", parameter=name, hint="leave it out"
            )


def _check_count(messages: Sequence[ChatMessage], max_positions: int) -> None:
    if not messages:
        raise InvalidRequest("messages is empty", parameter="messages")
    if len(messages) > max_positions:  # each takes a token at least, whatever the template
        raise InvalidRequest(
            f"messages: {len(messages)} of them; the model has {max_positions} positions",
            parameter="messages", hint="send fewer",
        )  # fmt: skip


def _message(message: ChatMessage) -> dict[str, Any]:
    content = message.content
    if isinstance(content, list):
        if foreign := next((part.type for part in content if part.type != "text"), None):
            raise InvalidRequest(
                f"content part {_clipped(foreign)!r}: this model reads text only", parameter="messages"
            )
        content = "".join(part.text for part in content)
    return {"role": message.role, "content": content or ""}


def _check_length(parameter: str, count: int, tokenizer: ChatTokenizer, max_positions: int) -> None:
    """Refuses text that cannot fit whatever its tokens are, before any time goes into it."""
    if count > max_positions * tokenizer.longest:
        raise InvalidRequest(
            f"{parameter}: {count} characters; the model has {max_positions} positions, "
            f"of {tokenizer.longest} characters at most",
            parameter=parameter, hint="shorten it",
        )  # fmt: skip


def _forced_ids(body: ChatBody, tokenizer: ChatTokenizer, max_positions: int) -> tuple[int, ...]:
    if body.dockyard is None or body.dockyard.forced_text is None:
        return ()
    text = body.dockyard.forced_text
    _check_length("dockyard.forced_text", len(text), tokenizer, max_positions)
    ids = tokenizer.encode_text(text)
    if not ids:
        raise InvalidRequest("forced_text is empty", parameter="dockyard.forced_text")
    return tuple(ids)


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > 16:
        raise InvalidRequest(f"stop has {len(stops)} strings; at most 16", parameter="stop")
    if (longest := max(map(len, stops), default=0)) > _STOP_CHARS:
        raise InvalidRequest(
            f"stop has a string of {longest} characters; at most {_STOP_CHARS}", parameter="stop"
        )
    return stops


def _clipped(text: str) -> str:
    """The start and the end of what a client sent, or of what quotes it: an answer is not for megabytes."""
    return text if len(text) <= 400 else f"{text[:200]} … {text[-200:]}"


def _within(name: str, value: float, low: float, high: float) -> float:
    if not low <= value <= high:
        bounds = f"{_plain(low)} and {_plain(high)}"
        raise InvalidRequest(f"{name} is {value}; it must be between {bounds}", parameter=name)
    return value


def _plain(value: float) -> str:
    """Whole numbers with all of their digits."""
    return str(int(value)) if value == int(value) else repr(value)


def _at_least(name: str, value: int, low: int) -> int:
    if value < low:
        raise InvalidRequest(f"{name} is {value}; it must be at least {low}", parameter=name)
    return value


def _field_of(message: str) -> str:
    """msgspec ends its messages with the path: `… - at `$.messages[0].role``."""
    _, _, path = message.partition("`$.")
    return path.strip("`") or "body"
