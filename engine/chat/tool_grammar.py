"""The text of tool calls as a grammar: a reply that must call a tool can then be nothing else.

In xgrammar's form of a structural tag, as JSON. Two forms of calls: DSML, which DeepSeek's models are trained
on (`engine.chat.dsml`), and JSON between tags, which models of the llama family write.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from engine.chat.dsml import MARKER, V4, V41, Dialect, checked_name

JSON_FORM = "json"
Form = Dialect | Literal["json"]
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
_STYLES = {V41: "deepseek_v4_1_xml", V4: "deepseek_xml"}
# Characters between the parts of arguments: as DSML is written, and enough for JSON with indentation.
_MOST_SPACES = {"deepseek_v4_1_xml": 1, "deepseek_xml": 1, "json": 16}


@dataclass(frozen=True, slots=True)
class Signature:
    """A function that may be called; without `parameters` it takes whatever is an object."""

    name: str
    parameters: Mapping[str, Any] | None = None


def tool_grammar(functions: Sequence[Signature], form: Form, *, several: bool = True) -> str:
    """One call or more (`several`) of these functions, each with arguments that its schema allows."""
    if isinstance(form, Dialect):
        content = _calls([_dsml_call(function, form) for function in functions], "", several)
        begin, end = form.opening(form.block) + ">\n", form.closing(form.block)
        shape = {"type": "tag", "begin": f"\n\n{begin}", "content": content, "end": end}
    else:
        shape = _calls([_json_call(function) for function in functions], "\n", several)
    return json.dumps({"type": "structural_tag", "format": shape}, ensure_ascii=False)


def _calls(tags: list[dict[str, Any]], separator: str, several: bool) -> dict[str, Any]:
    return {
        "type": "tags_with_separator", "tags": tags, "separator": separator, "at_least_one": True,
        "stop_after_first": not several,
    }  # fmt: skip


def _json_call(function: Signature) -> dict[str, Any]:
    name = json.dumps(function.name, ensure_ascii=False)
    return {
        "type": "tag", "begin": f'{CALL_OPEN}\n{{"name": {name}, "arguments": ',
        "content": _arguments(function, "json", []), "end": f"}}\n{CALL_CLOSE}",
    }  # fmt: skip


def _dsml_call(function: Signature, dialect: Dialect) -> dict[str, Any]:
    begin = f'{dialect.opening("invoke")} name="{checked_name(function.name)}">\n'
    content = _arguments(function, _STYLES[dialect], [MARKER])
    return {"type": "tag", "begin": begin, "content": content, "end": dialect.closing("invoke") + "\n"}


def _arguments(function: Signature, style: str, excludes: list[str]) -> dict[str, Any]:
    schema = dict(function.parameters or {"type": "object", "additionalProperties": True})
    return {
        "type": "json_schema", "json_schema": schema, "style": style,
        "max_whitespace_cnt": _MOST_SPACES[style], "excludes": excludes,
    }  # fmt: skip
