"""A chat completion request: rendered, tokenised and checked.

`model` is not looked at: the one model that is served answers to every name, since agents' side requests name
models that exist only elsewhere. The reply's `model` says which one has answered.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from engine.chat.form import ChatForm, Conversation, check_length
from engine.chat.tokenizer import ChatTokenizer
from engine.errors import ContextExceeded, InvalidRequest
from gateway.chat_body import ChatBody, ChatMessage, NamedTool, check_chat, parse_chat
from gateway.chat_sampling import chat_logprobs, read_choices, read_max_tokens, read_sampling
from gateway.chat_structure import callable_functions, read_functions, read_structure
from gateway.config import GatewayConfig
from gateway.extension import read_generation
from gateway.generation import Asked
from gateway.sampling_body import StreamOptions, clipped
from protocol.sampling import Structure

__all__ = ["parse_chat", "prepare_chat"]


def prepare_chat(
    body: ChatBody, form: ChatForm, tokenizer: ChatTokenizer, max_positions: int, config: GatewayConfig
) -> Asked:
    """Render, tokenise and check against the model's limits. Raises InvalidRequest.

    Blocks, for seconds where a message has megabytes and the model as many positions, and without bound in
    a template, which is a program of the model file: not for an event loop.
    """
    check_chat(body)
    _check_count(body.messages, max_positions)
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    structure = read_structure(body, form.calls)
    sampling = read_sampling(body, 1 if asked is None else asked, chat_logprobs(body), structure)
    may_call = bool(callable_functions(body))
    conversation = _conversation(body)
    prompt = form.prompt(conversation, max_positions)
    forced = _forced_ids(body, tokenizer, max_positions)
    max_tokens = read_max_tokens(
        asked, config.default_max_tokens, len(prompt.ids), max_positions,
        needed=len(forced) or (1 if asked is None else asked), parameter="messages",
    )  # fmt: skip
    sampling = replace(
        sampling, max_tokens=max_tokens, forced_ids=forced,
        structure=_behind_reasoning(structure, prompt.reasoning_end),
    )  # fmt: skip
    generation = replace(
        read_generation(body, read_choices(body, sampling, config)),
        prompt_ids=prompt.ids,
        reader=partial(form.reader, conversation, prompt, may_call=may_call),
        names_tool=isinstance(body.tool_choice, NamedTool),
    )
    options = body.stream_options or StreamOptions()
    return Asked((generation,), bool(body.stream), options.include_usage)


def _conversation(body: ChatBody) -> Conversation:
    return Conversation(
        [_message(message) for message in body.messages],
        [msgspec.to_builtins(function) for function in read_functions(body)],
        body.reasoning_effort,
        _schema(body),
    )


def _schema(body: ChatBody) -> dict[str, Any] | None:
    """What a form may tell the model of its reply's form."""
    asked = body.response_format
    if asked is None or asked.type not in ("json_schema", "json_object"):
        return None
    schema = asked.json_schema.schema if asked.json_schema is not None else None
    return schema if isinstance(schema, dict) else {"type": "object"}


def _behind_reasoning(structure: Structure | None, end: int) -> Structure | None:
    return None if structure is None else replace(structure, begins_after=end)


def _check_count(messages: Sequence[ChatMessage], max_positions: int) -> None:
    if not messages:
        raise InvalidRequest("messages is empty", parameter="messages")
    if len(messages) > max_positions:  # each takes a token at least, whatever the template
        raise ContextExceeded.of(
            max_positions, f"there are {len(messages)} messages, of a token at least",
            parameter="messages", please="send fewer",
        )  # fmt: skip


def _message(message: ChatMessage) -> dict[str, Any]:
    """As a form takes it."""
    content = message.content
    if isinstance(content, list):
        foreign = next((part.type for part in content if part.type != "text"), None)
        if foreign is not None:
            raise InvalidRequest(
                f"content part {clipped(foreign)!r}: this model reads text only", parameter="messages"
            )
        content = "".join(part.text for part in content)
    found: dict[str, Any] = {"role": message.role, "content": content or ""}
    if message.tool_calls:
        found["tool_calls"] = msgspec.to_builtins(message.tool_calls)
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if reasoning := message.reasoning_content or message.reasoning:
        found["reasoning"] = reasoning
    return found


def _forced_ids(body: ChatBody, tokenizer: ChatTokenizer, max_positions: int) -> tuple[int, ...]:
    if body.dockyard is None or body.dockyard.forced_text is None:
        return ()
    text = body.dockyard.forced_text
    check_length("dockyard.forced_text", len(text), tokenizer, max_positions)
    ids = tokenizer.encode_text(text)
    if not ids:
        raise InvalidRequest("forced_text is empty", parameter="dockyard.forced_text")
    return tuple(ids)
