"""A reply's text to reasoning, content and tool calls, as it comes in.

The events do not depend on where the text is cut: what could still become a tag is held back. Tolerance is
that of the fact sheet, section 10, and no more; what it does not cover becomes a BrokenCall, never a guess.
"""

import json
import math
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NoReturn, cast

from engine.chat.dsml import Dialect, ToolCall

THINK = ("<think>", "</think>")
_WRAPPERS = ("arguments", "input")


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class BrokenCall:
    """A call that cannot be read: cut off, or not DSML. `text` is what stands there."""

    text: str
    reason: str


Event = Reasoning | Content | ToolCall | BrokenCall


class _Part(Enum):
    REASONING = auto()
    CONTENT = auto()
    BLOCK = auto()
    OVER = auto()


class ReplyParser:
    """One reply. Push text as it comes, then finish; adjacent Reasoning and Content events belong together.

    `thinking`: the prompt has opened `<think>`. `schemas`: the parameter names of each tool, where known.
    """

    def __init__(
        self, dialect: Dialect, *, thinking: bool, schemas: Mapping[str, Set[str]] | None = None
    ) -> None:
        self._tags = _Tags(dialect)
        self._part = _Part.REASONING if thinking else _Part.CONTENT
        self._schemas = schemas or {}
        self._text = ""  # not given out yet
        self._searched = 0  # of it, characters in which no tag of a block begins: no second look at them

    def push(self, text: str) -> list[Event]:
        """What this text makes certain."""
        self._text += text
        events: list[Event] = []
        while (made := self._advance()) is not None:
            events += made
        return events

    def finish(self) -> list[Event]:
        """The end of the reply: what was held back, and a BrokenCall where it ends inside of one."""
        rest, part = self._text, self._part
        self._text, self._part = "", _Part.OVER
        if part is _Part.BLOCK and rest.strip():
            return [BrokenCall(rest, "the reply ends inside a call")]
        return self._prose(rest, part)

    def _advance(self) -> list[Event] | None:
        """Events of the next piece, or None where more text is needed."""
        if self._part is _Part.OVER:
            self._text = ""
            return None
        return self._advance_block() if self._part is _Part.BLOCK else self._advance_prose()

    def _advance_prose(self) -> list[Event] | None:
        part, text = self._part, self._text
        if tag := self._tags.in_prose.search(text):
            self._text, self._searched = text[tag.end() :], 0
            if tag[0] not in THINK:
                self._part = _Part.BLOCK
            elif tag[0] == "</think>":
                self._part = _Part.CONTENT
            return self._prose(text[: tag.start()], part)
        certain = len(text) - self._tags.held(text)
        self._text = text[certain:]
        return self._prose(text[:certain], part) or None

    def _prose(self, text: str, part: _Part) -> list[Event]:
        if not text or part not in (_Part.REASONING, _Part.CONTENT):
            return []
        return [Reasoning(text) if part is _Part.REASONING else Content(text)]

    def _advance_block(self) -> list[Event] | None:
        """Up to the next call's start, which `_text` begins with afterwards; then the call itself."""
        tags, text = self._tags, self._text
        if text.startswith(tags.call_open):
            return self._advance_call()
        begin = tags.in_block.search(text, self._searched)
        if begin is None:
            self._searched = max(0, len(text) - tags.longest)
            return None
        self._text, self._searched = text[begin.start() :], 0
        if begin[0] == tags.block_close:
            self._part = _Part.OVER
        between = text[: begin.start()]
        return [BrokenCall(between, "text between the calls")] if between.strip() else []

    def _advance_call(self) -> list[Event] | None:
        tags, text = self._tags, self._text
        end = tags.after_call.search(text, max(len(tags.call_open), self._searched))
        if end is None:
            self._searched = max(0, len(text) - tags.longest)
            return None
        stop = end.end() if end[0] == tags.call_close else end.start()
        self._text, self._searched = text[stop:], 0
        return [tags.read_call(text[: end.start()], self._schemas)]


class _Tags:
    """The tags of a dialect, and how the text of one call is read with them."""

    def __init__(self, dialect: Dialect) -> None:
        self.block_open = dialect.opening(dialect.block) + ">"
        self.block_close = dialect.closing(dialect.block)
        self.call_close = dialect.closing("invoke")
        self.call_open = dialect.opening("invoke") + " "
        self._value_open = dialect.opening("parameter")
        self._value_close = dialect.closing("parameter")
        self._opened = ("\n\n" + self.block_open, "\n" + self.block_open, self.block_open, *THINK)
        self.in_prose = _any(self._opened)
        self.in_block = _any((self.call_open, self.block_close))
        self.after_call = _any((self.call_close, self.call_open, self.block_close))
        self.longest = max(map(len, (self.call_close, self.call_open, self.block_close)))
        self._call = re.compile(rf'{re.escape(self.call_open)}name="([^"]*)">')
        value = rf'{re.escape(self._value_open)} name="([^"]*)"(?: string="(true|false)")?>'
        self._value = re.compile(value)

    def held(self, text: str) -> int:
        """Length of the end of `text` that could still become a tag, or the blank line before a block."""
        longest = min(len(text), len(self._opened[0]) - 1)
        return next((n for n in range(longest, 0, -1) if self._begins(text[-n:])), 0)

    def _begins(self, text: str) -> bool:
        return any(tag.startswith(text) for tag in self._opened)

    def read_call(self, text: str, schemas: Mapping[str, Set[str]]) -> ToolCall | BrokenCall:
        """The call that `text` holds, from its opening tag to before its closing one."""
        try:
            head = self._call.match(text)
            if head is None:
                raise ValueError("an invoke tag without a name")
            arguments = self._arguments(text[head.end() :])
        except (ValueError, RecursionError) as error:
            return BrokenCall(text, str(error))
        return ToolCall(head[1], _unwrapped(arguments, schemas.get(head[1])))

    def _arguments(self, body: str) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        opened = list(self._value.finditer(body))
        if len(opened) != body.count(self._value_open):
            raise ValueError("a parameter tag without a name, or with other attributes")
        starts = [*(tag.start() for tag in opened), len(body)]
        rest = body[: starts[0]]
        for tag, end in zip(opened, starts[1:], strict=True):
            _expect_blank(rest)
            value, closed, rest = body[tag.end() : end].partition(self._value_close)
            # Without its closing tag a value ends before the line break that the next tag stands behind.
            arguments[tag[1]] = _value(value if closed else value.removesuffix("\n"), tag[2])
        _expect_blank(rest)
        return arguments


def _value(text: str, string: str | None) -> Any:
    if string == "true":
        return text
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except ValueError:
        if string == "false":
            raise ValueError(f"the value {text!r:.40} is said to be JSON and is not") from None
        return text


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_constant(text)


def _unwrapped(arguments: dict[str, Any], schema: Set[str] | None) -> dict[str, Any]:
    """The object within an only `arguments` or `input` key, where the tool is known to lack that key."""
    if len(arguments) != 1 or schema is None:
        return arguments
    ((key, value),) = arguments.items()
    if key in _WRAPPERS and key not in schema and isinstance(value, dict):
        return cast(dict[str, Any], value)
    return arguments


def _expect_blank(text: str) -> None:
    if text.strip():
        raise ValueError(f"text between the parameters: {text.strip()!r:.40}")


def _any(literals: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, literals)))
