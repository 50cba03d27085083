"""The body of a chat completion request, as it comes: typed, unknown keys ignored, since clients send many.

Sources: OpenAI API reference, chat completions; vLLM's extra fields.
"""

from typing import Any, Literal

import msgspec

from gateway.sampling_body import SamplingBody, check_done, parse_body

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
    reasoning_content: str | None = None  # of an earlier turn, where the model's form keeps it
    reasoning: str | None = None  # vLLM's name of the same


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


class ChatBody(SamplingBody, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | int | None = None
    # Not done: see _NEUTRAL.
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    continue_final_message: Any = None
    add_generation_prompt: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    documents: Any = None
    thinking: Any = None


_NEUTRAL: dict[str, tuple[object, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "thinking": ({"type": "enabled"},),  # what a model that reasons does unasked
}


def parse_chat(body: bytes) -> ChatBody:
    """Raises InvalidRequest that names the field."""
    return parse_body(body, ChatBody)


def check_chat(body: ChatBody) -> None:
    """Refuses what is not done yet."""
    check_done(body, _NEUTRAL)
