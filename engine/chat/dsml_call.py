"""One tool call as its text comes in: its name, its arguments as JSON piece by piece, and the whole.

A string argument streams; any other waits for its end, since only then it is known to be JSON. Tolerance is
that of the fact sheet, section 10; what it does not cover makes the call a BrokenCall, never a guess.
"""

import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any, cast

from engine.chat.dsml import Dialect, ToolCall, finite_json, json_text

_WRAPPERS = ("arguments", "input")


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A ToolCall or a BrokenCall follows, with CallArguments before it."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next characters of a call's arguments: all of them together are a JSON object."""

    text: str


@dataclass(frozen=True, slots=True)
class BrokenCall:
    """A call that cannot be read: cut off, or not DSML. `text` is what stands there."""

    text: str
    reason: str


CallEvent = CallBegun | CallArguments | ToolCall | BrokenCall


class Tags:
    """The tags of a dialect, as text and as patterns."""

    def __init__(self, dialect: Dialect) -> None:
        self.block_open = dialect.opening(dialect.block) + ">"
        self.block_close = dialect.closing(dialect.block)
        self.call_open = dialect.opening("invoke") + " "
        self.call_close = dialect.closing("invoke")
        self.value_open = dialect.opening("parameter")
        self.value_close = dialect.closing("parameter")
        after_call = (self.call_close, self.call_open, self.block_close)
        value_ends = (self.value_open, *after_call)
        self.in_block = any_of((self.call_open, self.block_close))
        self.after_call = any_of(after_call)
        self.in_call = any_of(value_ends)
        self.in_value = any_of((self.value_close, *value_ends))
        self.ends_value = (self.value_close, *value_ends, *(f"\n{tag}" for tag in value_ends))
        self.longest = max(map(len, self.ends_value))
        self.call = re.compile(rf'{re.escape(self.call_open)}name="([^"]*)">')
        self.value = re.compile(rf'{re.escape(self.value_open)} name="([^"]*)"(?: string="(true|false)")?>')


class CallReader:
    """Push text from the start of an invoke tag on; when the call is over, `rest` is the text after it."""

    def __init__(self, tags: Tags, schemas: Mapping[str, Set[str]]) -> None:
        self.rest: str | None = None
        self._tags, self._schemas = tags, schemas
        self._text, self._searched = "", 0  # not read yet; of it, characters in which no tag begins
        self._read: list[str] = []
        self._step: Callable[[], list[CallEvent] | None] = self._read_head
        self._name, self._reason = "", ""
        self._arguments: dict[str, Any] = {}
        self._parameter, self._string = "", ""
        self._value: list[str] = []
        self._waits = False  # with all arguments: they may have to be unwrapped

    def push(self, text: str) -> list[CallEvent]:
        """What this text makes certain."""
        self._text += text
        events: list[CallEvent] = []
        while self.rest is None and (made := self._step()) is not None:
            events += made
        return events

    def finish(self) -> BrokenCall:
        """The call where the reply has ended inside it."""
        return BrokenCall("".join(self._read) + self._text, "the reply ends inside a call")

    def _consume(self, count: int) -> None:
        self._read.append(self._text[:count])
        self._text, self._searched = self._text[count:], 0

    def _search(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """The first tag; where there is none, no second look at what has been searched."""
        found = pattern.search(self._text, self._searched)
        if found is None:
            self._searched = max(0, len(self._text) - self._tags.longest)
        return found

    def _read_head(self) -> list[CallEvent] | None:
        end = self._tags.after_call.search(self._text, len(self._tags.call_open))
        head = self._tags.call.match(self._text, 0, end.start() if end else len(self._text))
        if head is not None:
            self._name = head[1]
            self._consume(head.end())
            self._step = self._read_gap
            return [CallBegun(self._name)]
        if end is None:
            return None
        self._consume(len(self._tags.call_open))
        return self._break("an invoke tag without a name")

    def _read_gap(self) -> list[CallEvent] | None:
        """Up to the next parameter, or the end of the call."""
        tag = self._search(self._tags.in_call)
        if tag is None:
            return None
        if between := self._text[: tag.start()].strip():
            return self._break(f"text between the parameters: {between!r:.40}")
        if tag[0] != self._tags.value_open:
            self._consume(tag.start())
            return self._end(tag[0], self._whole())
        end = self._tags.after_call.search(self._text, tag.end())
        opened = self._tags.value.match(self._text, tag.start(), end.start() if end else len(self._text))
        if opened is not None:
            self._consume(opened.end())
            return self._begin_value(opened[1], opened[2] or "")
        return self._break("a parameter tag without a name, or with other attributes") if end else None

    def _begin_value(self, name: str, string: str) -> list[CallEvent]:
        schema = self._schemas.get(self._name)
        if not self._arguments and name in _WRAPPERS and schema is not None and name not in schema:
            self._waits = True
        self._parameter, self._string, self._value = name, string, []
        self._step = self._read_value
        return self._stream(f'{self._key()}"' if string == "true" else "")

    def _read_value(self) -> list[CallEvent] | None:
        tag = self._tags.in_value.search(self._text)
        if tag is None:
            certain = len(self._text) - held(self._text, self._tags.ends_value)
            piece = self._text[:certain]
            self._consume(certain)
            self._value.append(piece)
            return self._stream(_inner(piece) if self._string == "true" else "") if piece else None
        closed = tag[0] == self._tags.value_close
        last = self._text[: tag.start()]
        # Without its closing tag a value ends before the line break that the next tag stands behind.
        last = last if closed else last.removesuffix("\n")
        self._consume(tag.end() if closed else tag.start())
        self._step = self._read_gap
        return self._end_value(last)

    def _end_value(self, last: str) -> list[CallEvent]:
        text = "".join([*self._value, last])
        key = self._key()
        if self._string == "true":
            self._arguments[self._parameter] = text
            return self._stream(_inner(last) + '"')
        try:
            value = _parsed(text, must_be_json=self._string == "false")
        except (ValueError, RecursionError) as error:
            return self._break(str(error))
        self._arguments[self._parameter] = value
        return self._stream(key + json_text(value))

    def _key(self) -> str:
        return f"{', ' if self._arguments else '{'}{json_text(self._parameter)}: "

    def _stream(self, text: str) -> list[CallEvent]:
        return [CallArguments(text)] if text and not self._waits else []

    def _whole(self) -> list[CallEvent]:
        if not self._waits:
            end = CallArguments("}" if self._arguments else "{}")
            return [end, ToolCall(self._name, self._arguments)]
        arguments = self._arguments
        if len(arguments) == 1 and isinstance(inner := next(iter(arguments.values())), dict):
            arguments = cast(dict[str, Any], inner)
        return [CallArguments(json_text(arguments)), ToolCall(self._name, arguments)]

    def _break(self, reason: str) -> list[CallEvent]:
        self._reason, self._step = reason, self._skip
        return []

    def _skip(self) -> list[CallEvent] | None:
        """To the end of a call that is broken."""
        tag = self._search(self._tags.after_call)
        if tag is None:
            return None
        self._consume(tag.start())
        return self._end(tag[0], [BrokenCall("".join(self._read), self._reason)])

    def _end(self, tag: str, events: list[CallEvent]) -> list[CallEvent]:
        """`_text` begins with the tag; another one than the call's own is not the call's."""
        self.rest = self._text.removeprefix(tag) if tag == self._tags.call_close else self._text
        return events


def held(text: str, tags: tuple[str, ...]) -> int:
    """Length of the end of `text` that could still become one of the tags."""
    longest = min(len(text), max(map(len, tags)) - 1)
    return next((n for n in range(longest, 0, -1) if any(tag.startswith(text[-n:]) for tag in tags)), 0)


def any_of(literals: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, literals)))


def _inner(text: str) -> str:
    """A piece of a JSON string, without its quotes."""
    return json_text(text)[1:-1]


def _parsed(text: str, *, must_be_json: bool) -> Any:
    """JSON; without a `string` attribute any text that is none is a string."""
    try:
        return finite_json(text)
    except ValueError:
        if must_be_json:
            raise ValueError(f"the value {text!r:.40} is said to be JSON and is not") from None
        return text
