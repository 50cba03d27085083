"""Calls in a reply's text: the same whole and cut anywhere, and never one whose arguments are no object."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.chat.tool_calls import CallParser, TextCall, describe_tools, read_call, render_text_calls

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "<b> é漢"}}\n</tool_call>'
beside = st.sampled_from(["\n", "text ", "{", "é", "<tool"])
pieces = st.one_of(
    st.sampled_from([CALL, "<tool_call>", "</tool_call>", '{"name": 1}', "<tool_call>[1]</tool_call>"]),
    beside,
)


def events(text: str, cuts: set[int]) -> list[str | tuple[str, str]]:
    """Adjacent text joined; calls by name and arguments, since their ids are random."""
    parser = CallParser()
    found: list[str | TextCall] = []
    bounds = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    for start, end in pairwise(bounds):
        found += parser.push(text[start:end])
    found.append(parser.finish())
    joined: list[str | tuple[str, str]] = []
    for event in found:
        if isinstance(event, TextCall):
            joined.append((event.name, event.arguments))
        elif joined and isinstance(joined[-1], str):
            joined[-1] += event
        elif event:
            joined.append(event)
    return joined


@settings(max_examples=200, deadline=None)
@given(parts=st.lists(pieces, max_size=6), cuts=st.sets(st.integers(1, 300)))
def test_any_cut_gives_the_same_events(parts: list[str], cuts: set[int]) -> None:
    text = "".join(parts)
    assert events(text, cuts) == events(text, set()) == events(text, set(range(1, len(text))))


@settings(deadline=None)
@given(parts=st.lists(st.just(CALL) | beside, max_size=6))
def test_nothing_but_calls_and_the_line_breaks_before_them_is_taken_out(parts: list[str]) -> None:
    found = events("".join(parts), set())
    left = "".join(event for event in found if isinstance(event, str))
    assert left.replace("\n", "") == "".join(part for part in parts if part != CALL).replace("\n", "")
    assert len([event for event in found if not isinstance(event, str)]) == parts.count(CALL)


def test_text_and_several_calls_come_in_order() -> None:
    assert events(f"I see.\n\n{CALL}\n{CALL}bye", set()) == [
        "I see.", ("f", '{"a": "<b> é漢"}'), ("f", '{"a": "<b> é漢"}'), "bye",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    ["", "x", "[]", '{"name": "f", "arguments": []}', '{"arguments": {}}', "[" * 100_000, '{"name": NaN}'],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert read_call(text) is None
    assert events(f"<tool_call>{text}</tool_call>", set()) == [f"<tool_call>{text}</tool_call>"]


@settings(deadline=None)
@given(name=st.text(min_size=1), arguments=st.dictionaries(st.text(), st.text() | st.integers()))
def test_a_call_that_is_written_is_read_again(name: str, arguments: dict[str, object]) -> None:
    written = render_text_calls([(name, json.dumps(arguments))])
    inner = written.removeprefix("<tool_call>").removesuffix("</tool_call>")
    call = read_call(inner)
    assert call is not None
    assert (call.name, json.loads(call.arguments)) == (name, arguments)


def test_each_tool_is_described_on_a_line() -> None:
    told = describe_tools([{"name": "f"}, {"name": "é"}])
    assert '{"name": "f"}\n{"name": "é"}' in told
