"""Calls of a reply in pieces: whole behind each other, whatever tokens they come in."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_gguf import EOS, byte_ids

from engine.chat.deepseek import load_format
from engine.chat.deepseek_form import DeepseekForm
from engine.chat.deepseek_tokenizer import load_tokenizer
from engine.chat.dsml import V4, V41, Dialect, ToolCall, render_calls
from engine.chat.form import ChatPrompt, Conversation
from engine.chat.tokenizer import ChatTokenizer
from engine.model_path import NANO
from gateway.chat_reply import ChoiceResult, ReplyHead
from gateway.chat_writer import ChatWriter
from gateway.choice_reader import ChoiceReader, Delta
from gateway.generation import Generation
from protocol.sampling import SamplingParams
from protocol.wire import Tokens

FORMS = {
    dialect: DeepseekForm(load_format(family), load_tokenizer(Path(NANO)))
    for dialect, family in ((V41, "v41"), (V4, "v4"))
}
ASKED = Conversation([{"role": "user", "content": "?"}])
WRITE = ToolCall("write", {"path": "/tmp/a b", "text": 'say "hi" 2>&1\n\té😀' * 3, "mode": [1, {"x": None}]})

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,6}", fullmatch=True)
values = st.text(max_size=12) | st.integers() | st.none() | st.lists(st.booleans(), max_size=3)
calls = st.builds(ToolCall, names, st.dictionaries(names, values, max_size=3))


def request(dialect: Dialect, begun: tuple[int, ...] = (), may_call: bool = True) -> Generation:
    reader = partial(FORMS[dialect].reader, ASKED, ChatPrompt((1,)), may_call=may_call)
    return Generation((1,), (), reader=reader, generated_ids=begun)


def read(
    tokenizer: ChatTokenizer,
    text: str,
    *,
    dialect: Dialect = V41,
    size: int = 1,
    begun: int = 0,
    reason: Any = "stop",
    may_call: bool = True,
) -> list[Delta]:
    """Of a text whose every byte is a token, `size` at a time, behind `begun` that another has told."""
    ids = [*byte_ids(text.encode()), EOS]
    asked = request(dialect, tuple(ids[:begun]), may_call)
    reader, index, deltas = ChoiceReader(0, tokenizer, asked, SamplingParams()), begun, list[Delta]()
    while not (deltas and deltas[-1].result):
        part = tuple(ids[index : index + size])
        index += len(part)
        end = reason if index == len(ids) else None
        delta = reader.push(Tokens("r", index - len(part), part, end, 1, 2, 3, 0, 4, 0))
        deltas += [] if delta is None else [delta]
    return deltas


def joined(deltas: list[Delta]) -> list[tuple[str, str]]:
    """Calls as a client puts them together out of the events: names and arguments."""
    writer, found = ChatWriter(ReplyHead("r", 0, "m"), 1), list[dict[str, Any]]()
    for delta in deltas:
        for event in writer.events(delta):
            (choice,) = json.loads(event.removeprefix(b"data: "))["choices"]
            for piece in choice["delta"].get("tool_calls", []):
                if "id" in piece:
                    assert piece["index"] == len(found)
                    assert piece["type"] == "function"
                    found.append({"id": piece["id"], **piece["function"]})
                else:
                    assert piece.keys() == {"index", "function"}
                    found[piece["index"]]["arguments"] += piece["function"]["arguments"]
    assert len({call["id"] for call in found}) == len(found)
    return [(call["name"], call["arguments"]) for call in found]


def result_of(deltas: list[Delta]) -> ChoiceResult:
    result = deltas[-1].result
    assert result is not None
    return result


def whole(deltas: list[Delta]) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in result_of(deltas).calls]


@settings(deadline=None, max_examples=60)
@given(written=st.lists(calls, min_size=1, max_size=3), size=st.integers(1, 9), v41=st.booleans())
def test_pieces_behind_each_other_are_the_whole(
    tiny_tokenizer: ChatTokenizer, written: list[ToolCall], size: int, v41: bool
) -> None:
    dialect = V41 if v41 else V4
    text = f"Look: \n\n{render_calls(tuple(written), dialect)}"
    deltas = read(tiny_tokenizer, text, dialect=dialect, size=size)
    assert joined(deltas) == whole(deltas)
    assert [(name, json.loads(arguments)) for name, arguments in whole(deltas)] == [
        (call.name, call.arguments) for call in written
    ]
    assert "".join(delta.text for delta in deltas) == result_of(deltas).text == "Look: "
    assert result_of(deltas).finish_reason == "tool_calls"


def test_a_call_split_at_every_byte_is_the_call_in_two_pieces(tiny_tokenizer: ChatTokenizer) -> None:
    text = render_calls((WRITE, ToolCall("list", {})), V41)
    expected = whole(read(tiny_tokenizer, text, size=10_000))
    assert json.loads(expected[0][1]) == WRITE.arguments
    for size in (1, 2, 3, 5, 8, 13, 100):
        assert joined(read(tiny_tokenizer, text, size=size)) == expected
    for cut in range(1, len(text.encode())):
        head = read(tiny_tokenizer, text, size=cut)
        assert joined(head) == expected


def test_a_long_string_argument_comes_in_many_pieces(tiny_tokenizer: ChatTokenizer) -> None:
    deltas = read(tiny_tokenizer, render_calls((ToolCall("write", {"text": "word " * 200}),), V41), size=4)
    pieces = [call.arguments for delta in deltas for call in delta.calls if call.arguments]
    assert len(pieces) > 150
    assert max(map(len, pieces)) < 40


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_of_a_stream_that_goes_on_the_rest_of_a_call_is_told(
    tiny_tokenizer: ChatTokenizer, size: int
) -> None:
    """Cut at any byte: what had been told before, with what is told now, is the calls."""
    text = "hm\n\n" + render_calls((WRITE, ToolCall("list", {"n": 1})), V41)
    reader, before = ChoiceReader(0, tiny_tokenizer, request(V41), SamplingParams()), list[Delta]()
    expected = whole(read(tiny_tokenizer, text))
    for count, token in enumerate(byte_ids(text.encode()), 1):
        delta = reader.push(Tokens("r", count - 1, (token,), None, 1, 2, 3, 0, 4, 0))
        before += [] if delta is None else [delta]
        after = read(tiny_tokenizer, text, size=size, begun=count)
        assert joined([*before, *after]) == expected, f"cut behind byte {count}"
        assert "".join(delta.text for delta in [*before, *after]) == "hm"
        assert result_of(after).finish_reason == "tool_calls"


def cut_off() -> str:
    """Inside of a string argument."""
    return render_calls((WRITE,), V41).partition("2>&1")[0]


@pytest.mark.parametrize("size", [1, 10_000])
def test_a_call_that_is_cut_off_by_the_length_is_told_so_far(
    tiny_tokenizer: ChatTokenizer, size: int
) -> None:
    text = cut_off()
    deltas = read(tiny_tokenizer, text, size=size, reason="length")
    assert result_of(deltas).finish_reason == "length"
    assert all(not delta.lost for delta in deltas)
    ((name, arguments),) = joined(deltas)
    assert name == "write"
    assert arguments.startswith('{"path": "/tmp/a b", "text": "say')
    assert (whole(deltas), result_of(deltas).text) == ([], text[text.index("<｜DSML｜ invoke") :])


@pytest.mark.parametrize(
    "end",
    ["", '</｜DSML｜ parameter>\n<｜DSML｜ parameter name="n" string="false">{</｜DSML｜ parameter>'],
    ids=["it ends", "no JSON"],
)
def test_a_call_that_cannot_be_read_is_lost_in_a_stream_and_text_in_a_whole_reply(
    tiny_tokenizer: ChatTokenizer, end: str
) -> None:
    text = cut_off() + end
    text += "\n</｜DSML｜ invoke>\n</｜DSML｜ calls>" if end else ""
    deltas = read(tiny_tokenizer, text)
    assert any(delta.lost for delta in deltas)
    assert whole(deltas) == []
    assert '<｜DSML｜ invoke name="write">' in result_of(deltas).text


def test_a_call_that_nobody_asked_for_is_text_and_no_pieces(tiny_tokenizer: ChatTokenizer) -> None:
    text = render_calls((WRITE,), V41)
    deltas = read(tiny_tokenizer, text, may_call=False)
    assert joined(deltas) == []
    assert "".join(delta.text for delta in deltas) == text
