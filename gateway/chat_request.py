"""A chat completion request: rendered, tokenised and checked.

`model` is not looked at: the one model that is served answers to every name, since agents' side requests name
models that exist only elsewhere. The reply's `model` says which one has answered.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from engine.chat.deepseek import read_effort
from engine.chat.prompt import encode_messages
from engine.chat.template import ChatTemplate
from engine.chat.tokenizer import ChatTokenizer
from engine.chat.tool_calls import describe_tools, render_text_calls
from engine.errors import InvalidRequest
from gateway.chat_body import ChatBody, ChatMessage, NamedTool, StreamOptions, check_done, clipped, parse_chat
from gateway.chat_sampling import at_least, read_sampling, read_stops, within
from gateway.chat_structure import callable_functions, read_functions
from gateway.config import GatewayConfig
from protocol.sampling import SamplingParams

__all__ = ["ChatRequest", "parse_chat", "prepare_chat"]


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What is left after parsing: prompt ids and one set of sampling parameters a choice."""

    prompt_ids: tuple[int, ...]
    choices: tuple[SamplingParams, ...]
    stream: bool
    include_usage: bool
    priority: int
    arrived_ns: int = 0  # when the gateway had its body; 0: when it is sent on
    may_call: bool = False  # the reply's text is searched for tool calls
    names_tool: bool = False  # the request has said which tool: the finish reason is then not `tool_calls`


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
    check_done(body)
    _check_count(body.messages, max_positions)
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    sampling = read_sampling(body, read_stops(body.stop), 1 if asked is None else asked)
    may_call = bool(callable_functions(body))
    prompt = _prompt(body, template, tokenizer, max_positions)
    forced = _forced_ids(body, tokenizer, max_positions)
    room = max_positions - len(prompt)
    needed = len(forced) or (1 if asked is None else asked)
    if room < needed:
        raise InvalidRequest(
            f"the model has {max_positions} positions; the prompt takes {len(prompt)}, the output {needed}",
            parameter="messages", hint="shorten the messages or lower max_tokens",
        )  # fmt: skip
    max_tokens = min(config.default_max_tokens, room) if asked is None else asked
    sampling = replace(sampling, max_tokens=at_least("max_tokens", max_tokens, 1), forced_ids=forced)
    count = int(within("n", 1 if body.n is None else body.n, 1, config.max_choices))
    choices = tuple(replace(sampling, seed=sampling.seed + index) for index in range(count))
    options = body.stream_options or StreamOptions()
    priority = int(within("priority", body.priority or 0, -(2**31), 2**31))
    return ChatRequest(
        tuple(prompt), choices, bool(body.stream), options.include_usage, priority,
        may_call=may_call, names_tool=isinstance(body.tool_choice, NamedTool),
    )  # fmt: skip


def _prompt(
    body: ChatBody, template: ChatTemplate, tokenizer: ChatTokenizer, max_positions: int
) -> list[int]:
    functions = read_functions(body)
    described: list[dict[str, Any]] = [msgspec.to_builtins(function) for function in functions]
    tools = [{"type": "function", "function": function} for function in described]
    variables: dict[str, Any] = {}
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = read_effort(body.reasoning_effort)
    knows_tools = bool(tools or any(m.tool_calls for m in body.messages)) and template.takes_tools
    messages = [_message(message, knows_tools) for message in body.messages]
    if tools and knows_tools:
        variables["tools"] = tools
    elif tools:
        messages = _with_tools(messages, describe_tools(described))
    _check_length("messages", sum(len(m["content"]) for m in messages), tokenizer, max_positions)
    return encode_messages(messages, template, tokenizer, variables)


def _with_tools(messages: list[dict[str, Any]], told: str) -> list[dict[str, Any]]:
    """The description in the system message, or as one."""
    if messages[0]["role"] in ("system", "developer"):
        content = f"{messages[0]['content']}\n\n{told}".lstrip()
        return [{**messages[0], "content": content}, *messages[1:]]
    return [{"role": "system", "content": told}, *messages]


def _check_count(messages: Sequence[ChatMessage], max_positions: int) -> None:
    if not messages:
        raise InvalidRequest("messages is empty", parameter="messages")
    if len(messages) > max_positions:  # each takes a token at least, whatever the template
        raise InvalidRequest(
            f"messages: {len(messages)} of them; the model has {max_positions} positions",
            parameter="messages", hint="send fewer",
        )  # fmt: skip


def _message(message: ChatMessage, knows_tools: bool) -> dict[str, Any]:
    """As a template takes it; calls are text where it knows none."""
    content = message.content
    if isinstance(content, list):
        if foreign := next((part.type for part in content if part.type != "text"), None):
            raise InvalidRequest(
                f"content part {clipped(foreign)!r}: this model reads text only", parameter="messages"
            )
        content = "".join(part.text for part in content)
    content = content or ""
    calls = message.tool_calls or []
    if calls and not knows_tools:
        written = render_text_calls([(call.function.name, call.function.arguments) for call in calls])
        content = f"{content}\n{written}".lstrip("\n")
    found: dict[str, Any] = {"role": message.role, "content": content}
    if calls and knows_tools:
        found["tool_calls"] = msgspec.to_builtins(calls)
    if message.tool_call_id is not None and knows_tools:
        found["tool_call_id"] = message.tool_call_id
    return found


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
