"""DSML, the notation of DeepSeek's tool calls: its tags, and how calls are written in it.

A string value stands raw between its tags, everything else as JSON. A string that holds the marker itself
could close its own tag; it is written as JSON, with the marker's bars escaped, so reading a call gives back
what was written for every text. Source: fact sheet, section 10; V4's spelling: appendix A.1.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from engine.errors import InvalidRequest

MARKER = "｜DSML｜"  # one token of the vocabulary


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is what JSON can hold. `id` ties a result to its call; it is not part of the prompt."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True, slots=True)
class Dialect:
    """`gap` follows the marker in each tag; `block` is the name of the tag around all calls."""

    gap: str
    block: str

    def opening(self, tag: str) -> str:
        """The start of a tag up to its name: attributes and `>` follow."""
        return f"<{MARKER}{self.gap}{tag}"

    def closing(self, tag: str) -> str:
        return f"</{MARKER}{self.gap}{tag}>"


V41 = Dialect(gap=" ", block="calls")
V4 = Dialect(gap="", block="tool_calls")


def render_calls(calls: tuple[ToolCall, ...], dialect: Dialect) -> str:
    """The block of all calls of one turn; a call without arguments holds an empty line.

    Raises InvalidRequest for a name that no tag can hold.
    """
    lines = [dialect.opening(dialect.block) + ">"]
    for call in calls:
        lines.append(f'{dialect.opening("invoke")} name="{checked_name(call.name)}">')
        lines.append("\n".join(_parameter(name, value, dialect) for name, value in call.arguments.items()))
        lines.append(dialect.closing("invoke"))
    return "\n".join([*lines, dialect.closing(dialect.block)])


def json_text(value: Any) -> str:
    """JSON as the model was trained on it: readable characters, a space after `,` and `:`.

    Half a surrogate pair has no UTF-8, so a value that holds one keeps its escapes.
    """
    text = json.dumps(value, ensure_ascii=False)
    return text if _is_utf8(text) else json.dumps(value)


def _parameter(name: str, value: Any, dialect: Dialect) -> str:
    raw = isinstance(value, str) and MARKER not in value and _is_utf8(value)
    text = value if raw else json_text(value).replace(MARKER, MARKER.replace("｜", "\\uff5c"))
    attributes = f'name="{checked_name(name)}" string="{"true" if raw else "false"}"'
    return f"{dialect.opening('parameter')} {attributes}>{text}{dialect.closing('parameter')}"


def can_name(name: str) -> bool:
    """Whether an attribute of a tag can hold it."""
    return '"' not in name and MARKER not in name and _is_utf8(name)


def finite_json(text: str) -> Any:
    """JSON as its standard has it: Python reads and writes NaN and Infinity too, and makes one of 1e999.

    Raises ValueError.
    """
    return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_constant(text)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def checked_name(name: str) -> str:
    """The name, where a tag can hold it. Raises InvalidRequest."""
    if not can_name(name):
        raise InvalidRequest(
            f"tool call: the name {name!r:.80} cannot stand in a call's tag",
            parameter="messages", hint=f'use names without quotes and without "{MARKER}"',
        )  # fmt: skip
    return name


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)
