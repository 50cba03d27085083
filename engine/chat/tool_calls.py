"""Tool calls as JSON between tags, which models of the llama family write: read from a reply, and written.

What does not read as a call stays text: nobody is handed arguments that are not JSON.
"""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from engine.chat.dsml_call import any_of, held
from engine.chat.tool_grammar import CALL_CLOSE, CALL_OPEN

_OPENINGS = (f"\n\n{CALL_OPEN}", f"\n{CALL_OPEN}", CALL_OPEN)
_OPENED = any_of(_OPENINGS)


@dataclass(frozen=True, slots=True)
class TextCall:
    """`arguments` is the JSON of an object: where it came in pieces, those one behind the other."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A TextCall or a CallLost of this id follows, and before it its arguments in pieces."""

    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """The next characters of the arguments of the call that was started last."""

    text: str


@dataclass(frozen=True, slots=True)
class CallLost:
    """A call that was started cannot be read, or is cut off. `text` is what stands there."""

    text: str
    reason: str


class CallParser:
    """One reply. Push text as it comes, then finish; what could become a tag is held back.

    The events do not depend on where the text is cut, but for how text beside calls is.
    """

    def __init__(self) -> None:
        self._text = ""
        self._opened = ""  # the tag of the call that has begun, with the line breaks before it

    def push(self, text: str) -> list[str | TextCall]:
        """What this text makes certain: text beside calls, and whole calls, in order."""
        self._text += text
        events: list[str | TextCall] = []
        while (made := self._next()) is not None:
            events += made
        return events

    def finish(self) -> str:
        """What is left: a call that the reply's end has cut off is text."""
        rest = self._opened + self._text
        self._text = self._opened = ""
        return rest

    def _next(self) -> list[str | TextCall] | None:
        """Events of the next piece, or None where more text is needed."""
        return self._next_of_call() if self._opened else self._next_of_text()

    def _next_of_text(self) -> list[str | TextCall] | None:
        text = self._text
        if opened := _OPENED.search(text):
            self._text, self._opened = text[opened.end() :], opened[0]
            return _some(text[: opened.start()])
        certain = len(text) - held(text, _OPENINGS)
        self._text = text[certain:]
        return _some(text[:certain]) or None

    def _next_of_call(self) -> list[str | TextCall] | None:
        inner, closed, after = self._text.partition(CALL_CLOSE)
        if not closed:
            return None
        whole = f"{self._opened}{inner}{CALL_CLOSE}"
        self._text, self._opened = after, ""
        return [read_call(inner) or whole]


def _some(text: str) -> list[str | TextCall]:
    return [text] if text else []


def read_call(text: str) -> TextCall | None:
    """The call that stands between the tags, or None where none does."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    fields = cast(dict[str, Any], value)
    name, arguments = fields.get("name"), fields.get("arguments", fields.get("parameters", {}))
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return TextCall(f"call_{secrets.token_hex(12)}", name, json.dumps(arguments, ensure_ascii=False))


def render_text_calls(calls: Sequence[tuple[str, str]]) -> str:
    """Names and arguments as a reply wrote them."""
    blocks: list[str] = []
    for name, arguments in calls:
        written = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}'
        blocks.append(f"{CALL_OPEN}\n{written}\n{CALL_CLOSE}")
    return "\n".join(blocks)


def describe_tools(tools: Sequence[dict[str, Any]]) -> str:
    """A system message for models whose template has no place for tools."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "These tools can be called, each described by a JSON schema:\n"
        f"{lines}\n"
        "To call one, answer with its name and arguments as JSON between tags:\n"
        f'{CALL_OPEN}\n{{"name": "…", "arguments": {{…}}}}\n{CALL_CLOSE}'
    )
