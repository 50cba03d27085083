"""A reply's text to reasoning, content and tool calls, as it comes in.

The events do not depend on where the text is cut: what could still become a tag is held back. Tolerance is
that of the fact sheet, section 10: stray think tags are absorbed, a block of calls ends the reasoning, and
what comes after the block is dropped.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from enum import Enum, auto

from engine.chat.dsml import Dialect
from engine.chat.dsml_call import BrokenCall, CallEvent, CallReader, Tags, any_of, held

THINK = ("<think>", "</think>")


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


Event = Reasoning | Content | CallEvent


class _Part(Enum):
    REASONING = auto()
    CONTENT = auto()
    BLOCK = auto()
    OVER = auto()


class ReplyParser:
    """One reply. Push text as it comes, then finish; adjacent events of text belong together.

    `thinking`: the prompt has opened `<think>`. `schemas`: the parameter names of each tool, where known.
    """

    def __init__(
        self, dialect: Dialect, *, thinking: bool, schemas: Mapping[str, Set[str]] | None = None
    ) -> None:
        self._tags = Tags(dialect)
        blocks = (f"\n\n{self._tags.block_open}", f"\n{self._tags.block_open}", self._tags.block_open)
        self._opened = (*blocks, *THINK)
        self._in_prose = any_of(self._opened)
        self._part = _Part.REASONING if thinking else _Part.CONTENT
        self._schemas = schemas or {}
        self._text = ""  # not given out yet
        self._searched = 0  # of it, characters in which no tag of a block begins: no second look at them
        self._call: CallReader | None = None

    def push(self, text: str) -> list[Event]:
        """What this text makes certain."""
        self._text += text
        events: list[Event] = []
        while (made := self._advance()) is not None:
            events += made
        return events

    def finish(self) -> list[Event]:
        """The end of the reply: what was held back, and a BrokenCall where it ends inside of one."""
        rest, part, call = self._text, self._part, self._call
        self._text, self._part, self._call = "", _Part.OVER, None
        if call is not None:
            return [call.finish()]
        if part is _Part.BLOCK and rest.strip():
            return [BrokenCall(rest, "the reply ends inside a call")]
        return self._prose(rest, part)

    def _advance(self) -> list[Event] | None:
        """Events of the next piece, or None where more text is needed."""
        match self._part:
            case _Part.OVER:
                self._text = ""
                return None
            case _Part.BLOCK:
                return self._advance_block() if self._call is None else self._advance_call(self._call)
            case _:
                return self._advance_prose()

    def _advance_prose(self) -> list[Event] | None:
        part, text = self._part, self._text
        if tag := self._in_prose.search(text):
            self._text = text[tag.end() :]
            if tag[0] not in THINK:
                self._part = _Part.BLOCK
            elif tag[0] == "</think>":
                self._part = _Part.CONTENT
            return self._prose(text[: tag.start()], part)
        certain = len(text) - held(text, self._opened)
        self._text = text[certain:]
        return self._prose(text[:certain], part) or None

    def _prose(self, text: str, part: _Part) -> list[Event]:
        if not text or part not in (_Part.REASONING, _Part.CONTENT):
            return []
        return [Reasoning(text) if part is _Part.REASONING else Content(text)]

    def _advance_block(self) -> list[Event] | None:
        """Up to the next call's start, or the end of the block."""
        tags, text = self._tags, self._text
        begin = tags.in_block.search(text, self._searched)
        if begin is None:
            self._searched = max(0, len(text) - tags.longest)
            return None
        self._text, self._searched = text[begin.start() :], 0
        if begin[0] == tags.block_close:
            self._part = _Part.OVER
        else:
            self._call = CallReader(tags, self._schemas)
        between = text[: begin.start()]
        return [BrokenCall(between, "text between the calls")] if between.strip() else []

    def _advance_call(self, call: CallReader) -> list[Event] | None:
        events: list[Event] = [*call.push(self._text)]
        self._text = ""
        if call.rest is not None:
            self._text, self._call = call.rest, None
            return events
        return events or None
