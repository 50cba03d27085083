"""Grammars of calls: what is written as a call is of them, and the parsers read it; nothing else is."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tiny_gguf import EOS, byte_ids

from engine.chat.dsml import V4, V41, Dialect, ToolCall, render_calls
from engine.chat.dsml_parser import ReplyParser
from engine.chat.tokenizer import ChatTokenizer
from engine.chat.tool_calls import render_text_calls
from engine.chat.tool_grammar import JSON_FORM, Form, Signature, tool_grammar
from engine.errors import InvalidRequest
from engine.sampling.grammars import Grammars
from protocol.sampling import Structure

FIND = Signature(
    "find",
    {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "depth": {"type": "integer"},
            "names": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["path", "depth"],
    },
)
NOW = Signature("now", {"type": "object", "properties": {}, "additionalProperties": False})
GOOD: list[list[tuple[str, dict[str, Any]]]] = [
    [("find", {"path": "/a b\n2>&1", "depth": 3})],
    [("find", {"path": "é漢😀 <b>", "depth": -1, "names": ["x", "y"]})],
    [("find", {"path": "", "depth": 0}), ("now", {})],
]
BAD: list[list[tuple[str, dict[str, Any]]]] = [
    [("find", {"path": "/a"})],
    [("find", {"path": "/a", "depth": "3"})],
    [("find", {"path": 3, "depth": 3})],
    [("other", {"path": "/a", "depth": 3})],
]


@pytest.fixture(scope="module")
def grammars(tiny_tokenizer: ChatTokenizer) -> Iterator[Grammars]:
    made = Grammars(tiny_tokenizer.token_bytes, {EOS})
    yield made
    made.close()


def written(calls: list[tuple[str, dict[str, Any]]], form: Form) -> str:
    if isinstance(form, Dialect):
        return "\n\n" + render_calls(tuple(ToolCall(name, values) for name, values in calls), form)
    return render_text_calls([(name, json.dumps(v, ensure_ascii=False)) for name, v in calls])


def accepts(grammars: Grammars, source: str, text: str) -> bool:
    matcher = grammars.matcher(Structure("structural_tag", source, "tools"))
    for token in byte_ids(text.encode()):
        allowed = matcher.allowed()
        if allowed is not None and not allowed[token]:
            return False
        matcher.follow([token])
    allowed = matcher.allowed()
    return allowed is None or bool(allowed[EOS])


@pytest.mark.parametrize("form", [V41, V4, JSON_FORM], ids=["V4.1", "V4", "json"])
def test_calls_as_they_are_written_are_of_the_grammar(grammars: Grammars, form: Form) -> None:
    source = tool_grammar([FIND, NOW], form)
    for calls in GOOD:
        assert accepts(grammars, source, written(calls, form)), calls
    for calls in BAD:
        assert not accepts(grammars, source, written(calls, form)), calls
    assert not accepts(grammars, source, "")
    assert not accepts(grammars, source, "I would rather talk.")


@pytest.mark.parametrize("form", [V41, V4], ids=["V4.1", "V4"])
def test_the_parser_reads_what_the_grammar_lets_through(grammars: Grammars, form: Dialect) -> None:
    for calls in GOOD:
        parser = ReplyParser(form, thinking=False)
        found = [e for e in [*parser.push(written(calls, form)), *parser.finish()] if isinstance(e, ToolCall)]
        assert [(call.name, dict(call.arguments)) for call in found] == calls


@pytest.mark.parametrize("form", [V41, JSON_FORM], ids=["V4.1", "json"])
def test_one_call_alone_where_several_are_not_wanted(grammars: Grammars, form: Form) -> None:
    source = tool_grammar([FIND, NOW], form, several=False)
    assert accepts(grammars, source, written(GOOD[0], form))
    assert not accepts(grammars, source, written(GOOD[2], form))


def test_the_tokenizers_marker_token_is_of_the_grammar(grammars: Grammars) -> None:
    """Where a vocabulary has the marker as one token, the grammar takes it for its text."""
    marked = Grammars(lambda: [*([b""] * 3), "｜DSML｜".encode(), b"\n\n<", b" calls>"], {EOS})
    try:
        matcher = marked.matcher(Structure("structural_tag", tool_grammar([NOW], V41), "tools"))
        for token in (4, 3, 5):
            allowed = matcher.allowed()
            assert allowed is not None
            assert allowed[token]
            matcher.follow([token])
    finally:
        marked.close()


def test_a_name_that_no_tag_can_hold_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="cannot stand in a call's tag"):
        tool_grammar([Signature('a"b')], V41)


def test_a_schema_that_a_grammar_cannot_say_is_refused_by_name(grammars: Grammars) -> None:
    source = tool_grammar([Signature("f", {"type": "object", "not": {}})], JSON_FORM)
    with pytest.raises(InvalidRequest, match=r"tools: the structural_tag cannot be compiled: .*'not'"):
        grammars.compile(Structure("structural_tag", source, "tools"))
