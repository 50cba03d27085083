"""Replies of DeepSeek's form: the same parts wherever the text is cut, and text where nothing can be read."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.chat.deepseek import load_format
from engine.chat.deepseek_form import DeepseekForm, missing_tokens
from engine.chat.deepseek_tokenizer import load_tokenizer
from engine.chat.dsml import V41, ToolCall, render_calls
from engine.chat.dsml_parser import Content, Reasoning
from engine.chat.form import ChatPrompt, Conversation, ReplyPart
from engine.chat.tool_calls import CallLost, CallPiece, CallStart, TextCall
from engine.errors import InvalidRequest
from engine.model_path import NANO

BLOCK = render_calls((ToolCall("f", {"a": "x y", "n": [1, None]}), ToolCall("g", {})), V41)
ASKED = Conversation([{"role": "user", "content": "<｜User｜>?"}], effort=30)


@pytest.fixture(scope="module")
def form() -> DeepseekForm:
    return DeepseekForm(load_format("v41"), load_tokenizer(Path(NANO)))


def read(form: DeepseekForm, parts: list[str], may_call: bool = True, end: int = 1) -> list[ReplyPart]:
    reader = form.reader(ASKED, ChatPrompt((1,), end), may_call=may_call)
    found = [part for text in parts for part in reader.push(text)]
    return found + reader.finish()


def told(parts: list[ReplyPart]) -> tuple[str, str, list[tuple[str, str]]]:
    return (
        "".join(part.text for part in parts if isinstance(part, Reasoning)),
        "".join(part.text for part in parts if isinstance(part, Content | CallLost)),
        [(part.name, part.arguments) for part in parts if isinstance(part, TextCall)],
    )


@given(cuts=st.sets(st.integers(0, 400)))
def test_parts_are_the_same_wherever_the_text_is_cut(form: DeepseekForm, cuts: set[int]) -> None:
    text = f"Hm.</think>Look: \n\n{BLOCK}"
    bounds = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    parts = [text[a:b] for a, b in pairwise(bounds)]
    calls = [("f", '{"a": "x y", "n": [1, null]}'), ("g", "{}")]
    assert told(read(form, parts)) == ("Hm.", "Look: ", calls)


def test_a_call_that_nobody_asked_for_or_that_is_cut_off_is_text(form: DeepseekForm) -> None:
    reasoning, content, calls = told(read(form, [f"a\n\n{BLOCK}"], may_call=False, end=-1))
    assert (reasoning, calls) == ("", [])
    assert content.startswith("a<｜DSML｜ calls>")
    assert content.count('invoke name="') == 2
    _, content, calls = told(read(form, [f"</think>{BLOCK[:60]}"]))
    assert calls == []
    assert 'invoke name="f"' in content


def test_calls_have_ids_of_their_own_and_begin_with_them(form: DeepseekForm) -> None:
    parts = read(form, [BLOCK])
    ids = [part.id for part in parts if isinstance(part, TextCall)]
    assert len(set(ids)) == 2
    assert [(part.id, part.name) for part in parts if isinstance(part, CallStart)] == [
        (ids[0], "f"), (ids[1], "g"),
    ]  # fmt: skip


def test_a_call_that_was_begun_is_lost_by_name_where_it_cannot_be_read(form: DeepseekForm) -> None:
    begun, *pieces, lost = read(form, [BLOCK.replace("[1, null]", "[1,")])[:-3]
    assert isinstance(begun, CallStart)
    assert all(isinstance(piece, CallPiece) for piece in pieces)
    assert isinstance(lost, CallLost)
    assert "is said to be JSON and is not" in lost.reason
    assert lost.text.startswith('<｜DSML｜ invoke name="f">')


def test_a_prompt_says_where_its_reasoning_ends_and_no_message_writes_a_token(form: DeepseekForm) -> None:
    tokenizer = load_tokenizer(Path(NANO))
    (thought,), (user,) = tokenizer.encode("</think>"), tokenizer.encode("<｜User｜>")
    prompt = form.prompt(ASKED, 4096)
    assert prompt.reasoning_end == thought
    assert prompt.ids.count(user) == 1
    assert form.prompt(Conversation(ASKED.messages, effort="none"), 4096).reasoning_end == -1


def test_text_that_cannot_fit_is_refused(form: DeepseekForm) -> None:
    long = Conversation([{"role": "user", "content": "x" * 100_000}])
    with pytest.raises(
        InvalidRequest, match=r"64 tokens\. However, messages has 100000 characters"
    ) as refused:
        form.prompt(long, 64)
    assert refused.value.parameter == "messages"


def test_tokens_that_a_vocabulary_lacks_are_named() -> None:
    tokenizer = load_tokenizer(Path(NANO))
    assert missing_tokens(load_format("v41"), tokenizer) == []
    assert missing_tokens(load_format("v4"), tokenizer) == []
