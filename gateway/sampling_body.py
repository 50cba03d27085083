"""What the bodies of all routes have in common: how tokens are chosen, and how the reply comes.

Typed, unknown keys ignored but for those below `dockyard`, since clients send many. Sources: OpenAI API
reference; vLLM's extra fields.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from engine.errors import InvalidRequest

Body = TypeVar("Body")


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class NamedSchema(msgspec.Struct):
    schema: dict[str, Any] | bool | None = None
    name: str = ""


class ResponseFormat(msgspec.Struct):
    """`format` is that of a structural_tag, xgrammar's."""

    type: str
    json_schema: NamedSchema | None = None
    format: dict[str, Any] | None = None


class StructuredOutputs(msgspec.Struct):
    """vLLM's: one of them."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None


class Extension(msgspec.Struct, forbid_unknown_fields=True):
    """Ours, of both routes but for `forced_text`, which is of chats. See docs/serving.md. No other client has
    a field here that we need not know, so one that is unknown is misspelt."""

    forced_text: str | None = None  # its tokens run through the engine instead of chosen ones; ordinary text
    slack_ms: float | None = None  # how much later the request may start without holding anyone up
    # A stream that goes on: the tokens that an earlier request has told of, and its `resumed`.
    generated_ids: list[int] | None = None
    resumed: list[int] | None = None


class SamplingBody(msgspec.Struct, kw_only=True):
    model: str = ""
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None
    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    dockyard: Extension | None = None
    # Not done: see check_done.
    bad_words: Any = None
    allowed_token_ids: Any = None
    echo: Any = None
    use_beam_search: Any = None
    truncate_prompt_tokens: Any = None
    skip_special_tokens: Any = None
    add_special_tokens: Any = None
    logits_processors: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None


def parse_body(body: bytes, kind: type[Body]) -> Body:
    """Raises InvalidRequest that names the field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from error
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}", parameter="body") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply", parameter="body") from error


# vLLM's names of structured_outputs' fields, from before it had them.
_OLD_NAMES = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_INSTEAD = {
    **dict.fromkeys(_OLD_NAMES, "send structured_outputs"),
    **dict.fromkeys(("thinking", "chat_template_kwargs"), "send reasoning_effort to say how much to think"),
}
# What would change the answer, and is not done: the values that ask for nothing, beside null.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "bad_words": ([],),
    "allowed_token_ids": (),
    "echo": (False,),
    "use_beam_search": (False,),
    "truncate_prompt_tokens": (),
    "skip_special_tokens": (True,),
    "logits_processors": ([],),
    **dict.fromkeys(_OLD_NAMES, ()),
}


def check_done(body: SamplingBody, neutral: Mapping[str, tuple[object, ...]]) -> None:
    """Refuses what is not done yet: an answer that leaves it out would look like one that has it.

    `neutral`: of the route's own fields the values that ask for nothing, beside null.
    """
    for name, values in {**_NEUTRAL, **neutral}.items():
        value = getattr(body, name)
        if value is not None and value not in values:
            raise InvalidRequest(
                f"{name} is not supported by this server yet", parameter=name,
                hint=_INSTEAD.get(name, "leave it out"),
            )  # fmt: skip


def clipped(text: str) -> str:
    """The start and the end of what a client sent, or of what quotes it: an answer is not for megabytes."""
    return text if len(text) <= 400 else f"{text[:200]} … {text[-200:]}"


def _refusal(message: str) -> InvalidRequest:
    field, unknown = _field_of(message), message.partition("unknown field `")[2].partition("`")[0]
    if not unknown:
        return InvalidRequest(clipped(message), parameter=field)
    fields = ", ".join(Extension.__struct_fields__)
    hint = f"leave it out; dockyard's fields are {fields}"
    return InvalidRequest(f"{field}.{clipped(unknown)} is unknown", parameter=field, hint=hint)


def _field_of(message: str) -> str:
    """msgspec ends its messages with the path: `… - at `$.messages[0].role``."""
    _, _, path = message.partition("`$.")
    return path.strip("`") or "body"
