"""The form of a model whose file carries a template; calls are JSON between tags."""

from collections.abc import Mapping
from typing import Any

from engine.chat.deepseek import read_effort
from engine.chat.dsml_parser import Content
from engine.chat.form import ChatPrompt, Conversation, PlainReader, ReplyPart, ReplyReader, check_length
from engine.chat.prompt import encode_messages
from engine.chat.template import ChatTemplate
from engine.chat.tokenizer import ChatTokenizer
from engine.chat.tool_calls import CallParser, describe_tools, render_text_calls
from engine.chat.tool_grammar import JSON_FORM, Form


class TemplateForm:
    """Tools go to a template that writes them; for another they are described in the system message."""

    def __init__(self, template: ChatTemplate, tokenizer: ChatTokenizer) -> None:
        self._template, self._tokenizer = template, tokenizer

    @property
    def calls(self) -> Form:
        return JSON_FORM

    def prompt(self, conversation: Conversation, max_positions: int) -> ChatPrompt:
        """See ChatForm. Without bound in the template, which is a program of the model file."""
        functions = list(conversation.functions)
        variables: dict[str, Any] = {}
        if conversation.effort is not None:
            variables["reasoning_effort"] = read_effort(conversation.effort)
        has_tools = bool(functions or any(m.get("tool_calls") for m in conversation.messages))
        knows_tools = has_tools and self._template.takes_tools
        messages = [_message(message, knows_tools) for message in conversation.messages]
        if functions and knows_tools:
            variables["tools"] = [{"type": "function", "function": function} for function in functions]
        elif functions:
            messages = _with_tools(messages, describe_tools([dict(function) for function in functions]))
        check_length("messages", sum(len(m["content"]) for m in messages), self._tokenizer, max_positions)
        return ChatPrompt(tuple(encode_messages(messages, self._template, self._tokenizer, variables)))

    def reader(self, conversation: Conversation, prompt: ChatPrompt, *, may_call: bool) -> ReplyReader:
        return _CallReader() if may_call else PlainReader()


class _CallReader:
    def __init__(self) -> None:
        self._parser = CallParser()

    def push(self, text: str) -> list[ReplyPart]:
        return [Content(part) if isinstance(part, str) else part for part in self._parser.push(text)]

    def finish(self) -> list[ReplyPart]:
        rest = self._parser.finish()
        return [Content(rest)] if rest else []


def _message(message: Mapping[str, Any], knows_tools: bool) -> dict[str, Any]:
    """As a template takes it; calls are text where it knows none."""
    content: str = message["content"]
    calls: list[dict[str, Any]] = message.get("tool_calls") or []
    if calls and not knows_tools:
        sent: list[dict[str, str]] = [call["function"] for call in calls]
        written = render_text_calls([(function["name"], function["arguments"]) for function in sent])
        content = f"{content}\n{written}".lstrip("\n")
    found: dict[str, Any] = {"role": message["role"], "content": content}
    if calls and knows_tools:
        found["tool_calls"] = calls
    if message.get("tool_call_id") is not None and knows_tools:
        found["tool_call_id"] = message["tool_call_id"]
    return found


def _with_tools(messages: list[dict[str, Any]], told: str) -> list[dict[str, Any]]:
    """The description in the system message, or as one."""
    if messages[0]["role"] in ("system", "developer"):
        content = f"{messages[0]['content']}\n\n{told}".lstrip()
        return [{**messages[0], "content": content}, *messages[1:]]
    return [{"role": "system", "content": told}, *messages]
