"""A choice out of its tokens: the same however they come, with what ended it."""

from functools import partial
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_gguf import EOS, byte_ids

from engine.chat.form import ChatPrompt, Conversation
from engine.chat.template import ChatTemplate
from engine.chat.template_form import TemplateForm
from engine.chat.tokenizer import ChatTokenizer
from gateway.chat_reply import ChoiceResult
from gateway.choice_reader import ChoiceReader
from gateway.generation import Generation
from protocol.sampling import SamplingParams
from protocol.sampling_reply import TokenLogprob, TokenLogprobs
from protocol.wire import Tokens

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def request(may_call: bool = False, names_tool: bool = False) -> Generation:
    """Of a form whose template is not reached."""
    form = TemplateForm(cast(ChatTemplate, None), cast(ChatTokenizer, None))
    reader = partial(form.reader, Conversation([]), ChatPrompt((1,)), may_call=may_call)
    return Generation((1,), (), reader=reader, names_tool=names_tool)


def read(
    tokenizer: ChatTokenizer,
    parts: list[list[int]],
    sampling: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
    asked: Generation | None = None,
) -> tuple[str, ChoiceResult]:
    """The text of all deltas, and the result."""
    reader = ChoiceReader(0, tokenizer, asked or request(), sampling)
    text, index = "", 0
    for number, part in enumerate(parts):
        reason = "stop" if number == len(parts) - 1 else None
        told = tuple(TokenLogprobs(token, -1.0, 1, (TokenLogprob(token, -1.0),)) for token in part)
        delta = reader.push(Tokens("r", index, tuple(part), reason, 1, 2, 3, 0, 4, 0, told))
        index += len(part)
        text += delta.text if delta is not None else ""
        if delta is not None and delta.result is not None:
            return text, delta.result
    raise AssertionError("the choice has not ended")


@settings(deadline=None)
@given(cut=st.integers(1, 60), tail=st.sampled_from(["", "é", "x"]))
def test_calls_are_found_wherever_the_tokens_are_cut(
    tiny_tokenizer: ChatTokenizer, cut: int, tail: str
) -> None:
    ids = byte_ids(f"hm\n{CALL}{tail}".encode())
    text, result = read(tiny_tokenizer, [ids[:cut], [*ids[cut:], EOS]], asked=request(may_call=True))
    assert text == result.text == f"hm{tail}"
    assert [(call.name, call.arguments) for call in result.calls] == [("f", "{}")]
    assert result.finish_reason == "tool_calls"
    assert result.num_tokens == len(ids) + 1


def test_a_call_that_nobody_asked_for_is_text(tiny_tokenizer: ChatTokenizer) -> None:
    text, result = read(tiny_tokenizer, [byte_ids(CALL.encode())])
    assert (text, result.calls, result.finish_reason) == (CALL, (), "stop")


def test_a_call_that_is_cut_off_is_text(tiny_tokenizer: ChatTokenizer) -> None:
    text, result = read(tiny_tokenizer, [byte_ids(CALL[:-4].encode())], asked=request(may_call=True))
    assert (text, result.calls, result.finish_reason) == (CALL[:-4], (), "stop")


def test_where_the_tool_was_named_the_reason_is_stop(tiny_tokenizer: ChatTokenizer) -> None:
    asked = request(may_call=True, names_tool=True)
    assert read(tiny_tokenizer, [byte_ids(CALL.encode())], asked=asked)[1].finish_reason == "stop"


@pytest.mark.parametrize(
    ("include", "text"), [(False, "a"), (True, "ab")], ids=["a stop token is hidden", "unless it is wanted"]
)
def test_a_stop_tokens_text(tiny_tokenizer: ChatTokenizer, include: bool, text: str) -> None:
    a, b = byte_ids(b"ab")
    sampling = SamplingParams(stop_token_ids=(b,), include_stop=include)
    given_out, result = read(tiny_tokenizer, [[a], [b]], sampling)
    assert (given_out, result.stop_reason) == (text, b)


def test_a_stop_string_is_told_and_later_tokens_are_not_waited_for(tiny_tokenizer: ChatTokenizer) -> None:
    parts = [byte_ids(b"a STO"), byte_ids(b"P x"), byte_ids(b"y")]
    text, result = read(tiny_tokenizer, parts, SamplingParams(stop=("STOP",)))
    assert (text, result.stop_reason, result.num_tokens) == ("a ", "STOP", 8)


def test_logprobs_have_the_tokens_bytes(tiny_tokenizer: ChatTokenizer) -> None:
    ids = [*byte_ids("é".encode()), EOS]
    _, result = read(tiny_tokenizer, [ids], SamplingParams(logprobs=1))
    assert result.logprobs is not None
    assert [entry["bytes"] for entry in result.logprobs] == [[0xC3], [0xA9], list(b"<|im_end|>")]
    assert [entry["token"] for entry in result.logprobs] == ["\ufffd", "\ufffd", "<|im_end|>"]
    _, silent = read(tiny_tokenizer, [ids])
    assert silent.logprobs is None
