"""Tool calls in DSML: written, read back, cut anywhere, and as far off the form as the reader bears."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.chat.dsml import MARKER, V4, V41, Dialect, ToolCall, render_calls
from engine.chat.dsml_call import BrokenCall, CallArguments, CallBegun
from engine.chat.dsml_parser import Content, Event, Reasoning, ReplyParser
from engine.errors import InvalidRequest

WEATHER = ToolCall("get_weather", {"city": "Oslo", "days": 2})
RENDERED = """<｜DSML｜ calls>
<｜DSML｜ invoke name="get_weather">
<｜DSML｜ parameter name="city" string="true">Oslo</｜DSML｜ parameter>
<｜DSML｜ parameter name="days" string="false">2</｜DSML｜ parameter>
</｜DSML｜ invoke>
</｜DSML｜ calls>"""

PIECES = [
    "<think>", "</think>", "\n", "\n\n", "<", "｜", "DSML", "｜DSML｜", " calls>",
    "<｜DSML｜ calls>", "</｜DSML｜ calls>",
    '<｜DSML｜ invoke name="a">', "</｜DSML｜ invoke>", '<｜DSML｜ parameter name="x" string="true">', "2>&1",
    '<｜DSML｜ parameter name="y">', "</｜DSML｜ parameter>", "{}", "[", "1e999", "text", '"',
    '<｜DSML｜ parameter name="input" string="false">', '{"k": ["v"]}',
]  # fmt: skip
tangles = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=30).map("".join)

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,8}", fullmatch=True)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text() | tangles,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
calls = st.builds(ToolCall, names, st.dictionaries(names, values, max_size=4))
dialects = st.sampled_from([V41, V4])


def read_all(
    text: str, *, dialect: Dialect = V41, thinking: bool = False, cuts: tuple[int, ...] = (), **known: Any
) -> list[Event]:
    """The reply's events with adjacent text joined."""
    parser = ReplyParser(dialect, thinking=thinking, **known)
    ends = [*sorted(cuts), len(text)]
    pieces = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return joined([event for piece in pieces for event in parser.push(piece)] + parser.finish())


def joined(events: list[Event]) -> list[Event]:
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, Reasoning | Content | CallArguments) and type(last) is type(event):
            out[-1] = replace(event, text=last.text + event.text)
        else:
            out.append(event)
    return out


def read(text: str, **options: Any) -> list[Event]:
    """Without the pieces of calls: a caller who does not stream passes over them."""
    return [event for event in read_all(text, **options) if not isinstance(event, CallBegun | CallArguments)]


def test_a_call_is_written_as_the_sheet_shows_it() -> None:
    assert render_calls((WEATHER,), V41) == RENDERED


def test_v4_writes_without_spaces_and_names_its_block_otherwise() -> None:
    text = render_calls((WEATHER,), V4)
    assert text.startswith(
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city"'
    )
    assert text.endswith("</｜DSML｜invoke>\n</｜DSML｜tool_calls>")


@settings(deadline=None)
@given(written=st.lists(calls, min_size=1, max_size=3), dialect=dialects)
def test_what_is_written_is_read_back(written: list[ToolCall], dialect: Dialect) -> None:
    assert read(render_calls(tuple(written), dialect), dialect=dialect) == written


@settings(deadline=None)
@given(written=calls, before=st.text(), dialect=dialects)
def test_text_before_the_block_keeps_every_character(
    written: ToolCall, before: str, dialect: Dialect
) -> None:
    text = before + "\n\n" + render_calls((written,), dialect)
    assert read(text, dialect=dialect) == ([Content(before)] if before else []) + [written]


@settings(deadline=None)
@given(text=tangles, thinking=st.booleans(), data=st.data())
def test_the_events_do_not_depend_on_the_cuts(text: str, thinking: bool, data: st.DataObject) -> None:
    cuts = tuple(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    assert read_all(text, thinking=thinking, cuts=cuts) == read_all(text, thinking=thinking)


@pytest.mark.parametrize("dialect", [V41, V4])
def test_every_cut_of_a_reply_gives_the_same_calls(dialect: Dialect) -> None:
    text = "need tool</think>I look.\n\n" + render_calls((WEATHER, WEATHER), dialect)
    whole = read(text, dialect=dialect, thinking=True)
    assert whole == [Reasoning("need tool"), Content("I look."), WEATHER, WEATHER]
    for cut in range(len(text)):
        assert read(text, dialect=dialect, thinking=True, cuts=(cut,)) == whole
    assert read(text, dialect=dialect, thinking=True, cuts=tuple(range(len(text)))) == whole


@settings(deadline=None)
@given(text=st.text() | tangles, thinking=st.booleans())
def test_any_text_is_read(text: str, thinking: bool) -> None:
    for event in read(text, thinking=thinking):
        if isinstance(event, ToolCall):
            json.dumps(event.arguments, allow_nan=False)


@settings(deadline=None)
@given(text=tangles, known=st.booleans())
def test_the_pieces_of_a_call_are_its_arguments(text: str, known: bool) -> None:
    """Of every call that is whole, in its order, with its name before them."""
    events = read_all("<｜DSML｜ calls>" + text, schemas={"a": {"x"}} if known else None)
    for index, event in enumerate(events):
        if isinstance(event, ToolCall):
            begun, pieces = events[index - 2 : index]
            assert begun == CallBegun(event.name)
            assert isinstance(pieces, CallArguments)
            assert json.loads(pieces.text) == event.arguments


@settings(deadline=None)
@given(written=calls, dialect=dialects, step=st.integers(1, 9))
def test_written_calls_stream(written: ToolCall, dialect: Dialect, step: int) -> None:
    text = render_calls((written,), dialect)
    begun, pieces, whole = read_all(text, dialect=dialect, cuts=tuple(range(0, len(text), step)))
    assert (begun, whole) == (CallBegun(written.name), written)
    assert isinstance(pieces, CallArguments)
    assert json.loads(pieces.text) == written.arguments


def test_a_long_string_argument_comes_in_pieces() -> None:
    parser = ReplyParser(V41, thinking=False)
    text = render_calls((ToolCall("write", {"path": "a", "text": 'say "hi"\n' * 3}),), V41)
    head, _, rest = text.partition("say")
    assert parser.push(head) == [
        CallBegun("write"), CallArguments('{"path": "'), CallArguments('a"'), CallArguments(', "text": "'),
    ]  # fmt: skip
    assert parser.push("say" + rest[:6]) == [CallArguments('say \\"hi\\"')]


def test_text_is_given_out_at_once() -> None:
    parser = ReplyParser(V41, thinking=True)
    assert parser.push("I wonder") == [Reasoning("I wonder")]
    assert parser.push(" <") == [Reasoning(" ")]
    assert parser.push("3") == [Reasoning("<3")]


def call(body: str) -> str:
    return f'<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n{body}\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('<｜DSML｜ parameter name="a">2</｜DSML｜ parameter>', {"a": 2}),
        ('<｜DSML｜ parameter name="a">two</｜DSML｜ parameter>', {"a": "two"}),
        ('<｜DSML｜ parameter name="a">NaN</｜DSML｜ parameter>', {"a": "NaN"}),
        ('<｜DSML｜ parameter name="a" string="true">2</｜DSML｜ parameter>', {"a": "2"}),
        ('<｜DSML｜ parameter name="a" string="true">x 2>&1</｜DSML｜ parameter>', {"a": "x 2>&1"}),
        ('<｜DSML｜ parameter name="a" string="true">\n\n</｜DSML｜ parameter>', {"a": "\n\n"}),
        ('<｜DSML｜ parameter name="a" string="true">x', {"a": "x"}),
        (
            '<｜DSML｜ parameter name="a" string="true">x\n'
            '<｜DSML｜ parameter name="b" string="false">1</｜DSML｜ parameter>',
            {"a": "x", "b": 1},
        ),
        ("", {}),
    ],
)  # fmt: skip
def test_missing_attributes_and_closing_tags(body: str, arguments: dict[str, Any]) -> None:
    assert read(call(body)) == [ToolCall("f", arguments)]


def test_a_call_without_its_end_ends_at_the_next_or_with_the_block() -> None:
    text = '<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n<｜DSML｜ invoke name="g">\n</｜DSML｜ calls>'
    assert read(text) == [ToolCall("f", {}), ToolCall("g", {})]


def test_a_block_within_reasoning_ends_it() -> None:
    assert read("so\n\n" + RENDERED, thinking=True) == [Reasoning("so"), WEATHER]


def test_stray_and_doubled_think_tags_are_absorbed() -> None:
    text = "<think>a<think>b</think></think>c<think>d</think>e"
    assert read(text, thinking=True) == [Reasoning("ab"), Content("cde")]


def test_text_after_the_block_is_dropped() -> None:
    assert read(RENDERED + "\nand so on <think>" + RENDERED) == [WEATHER]


def test_wrapped_arguments_are_unwrapped_where_the_tool_lacks_the_key() -> None:
    wrapped = ToolCall("f", {"arguments": {"city": "Oslo"}})
    text = render_calls((wrapped,), V41)
    assert read(text, schemas={"f": {"city"}}) == [ToolCall("f", {"city": "Oslo"})]
    assert read(text, schemas={"f": {"arguments"}}) == [wrapped]
    assert read(text) == [wrapped]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (RENDERED[:70], "ends inside a call"),
        (call('<｜DSML｜ parameter name="a" string="false">{"x":</｜DSML｜ parameter>'), "is not"),
        (call('<｜DSML｜ parameter name="a" string="false">1e999</｜DSML｜ parameter>'), "is not"),
        (call("<｜DSML｜ parameter a>1</｜DSML｜ parameter>"), "without a name"),
        (call('{"city": "Oslo"}'), "text between the parameters"),
        (call('<｜DSML｜ parameter name="a">1</｜DSML｜ parameter>!'), "text between the parameters"),
        ('<｜DSML｜ calls><｜DSML｜ invoke city="f"></｜DSML｜ invoke></｜DSML｜ calls>', "without a name"),
        ("<｜DSML｜ calls>\n{}\n</｜DSML｜ calls>", "text between the calls"),
        (call(f'<｜DSML｜ parameter name="a">{"[" * 100_000}</｜DSML｜ parameter>'), "recursion"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_a_broken_call(text: str, reason: str) -> None:
    (event,) = read(text)
    assert isinstance(event, BrokenCall)
    assert reason in event.reason


@pytest.mark.parametrize("name", ['say "hi"', f"a{MARKER}", "\ud800"])
def test_a_name_that_no_tag_can_hold_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot stand in"):
        render_calls((ToolCall(name, {}),), V41)


def test_a_long_argument_is_read_in_linear_time() -> None:
    """Searching it anew at each push would look at 10^10 characters."""
    long = "x" * 200_000
    text = render_calls((ToolCall("write", {"text": long}),), V41)
    assert read(text, cuts=tuple(range(0, len(text), 4))) == [ToolCall("write", {"text": long})]
