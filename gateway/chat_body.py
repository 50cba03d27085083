"""The body of a chat completion request, as it comes: typed, unknown keys ignored, since clients send many.

Sources: OpenAI API reference, chat completions; vLLM's extra fields. `dockyard` is our extension: forced text
for replays.
"""

from typing import Any, Literal

import msgspec

from engine.errors import InvalidRequest

# The roles of the API. A template may write others, and would write one of megabytes too.
Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class TextPart(msgspec.Struct):
    type: str
    text: str = ""


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str = "{}"


class SentCall(msgspec.Struct):
    """A call of an earlier turn."""

    function: CalledFunction
    id: str = ""
    type: str = "function"


class ChatMessage(msgspec.Struct):
    role: Role
    content: str | list[TextPart] | None = None
    tool_calls: list[SentCall] | None = None
    tool_call_id: str | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class Function(msgspec.Struct, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(msgspec.Struct):
    type: str
    function: Function | None = None


class NamedFunction(msgspec.Struct):
    name: str


class NamedTool(msgspec.Struct):
    type: str
    function: NamedFunction | None = None


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
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | int | None = None
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
    dockyard: Extension | None = None
    # Not done: see _NEUTRAL.
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    echo: Any = None
    continue_final_message: Any = None


# What would change the answer, and is not done: the values that ask for nothing, beside null.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "echo": (False,),
    "continue_final_message": (False,),
}


def parse_chat(body: bytes) -> ChatBody:
    """Raises InvalidRequest that names the field."""
    try:
        return msgspec.json.decode(body, type=ChatBody)
    except msgspec.ValidationError as error:
        raise InvalidRequest(clipped(str(error)), parameter=_field_of(str(error))) from error
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}", parameter="body") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply", parameter="body") from error


def check_done(body: ChatBody) -> None:
    """Refuses what is not done yet: an answer that leaves it out would look like one that has it."""
    for name, neutral in _NEUTRAL.items():
        value = getattr(body, name)
        if value is not None and value not in neutral:
            raise InvalidRequest(
                f"{name} is not supported by this server yet", parameter=name, hint="leave it out"
            )


def clipped(text: str) -> str:
    """The start and the end of what a client sent, or of what quotes it: an answer is not for megabytes."""
    return text if len(text) <= 400 else f"{text[:200]} … {text[-200:]}"


def _field_of(message: str) -> str:
    """msgspec ends its messages with the path: `… - at `$.messages[0].role``."""
    _, _, path = message.partition("`$.")
    return path.strip("`") or "body"
