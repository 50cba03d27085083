"""What clients and models write wrongly: told by name, or kept as text; never a raw exception."""

import json
from typing import Any

import pytest

from engine import load_model
from engine.chat.deepseek import load_format
from engine.chat.deepseek_form import DeepseekForm
from engine.chat.deepseek_tokenizer import load_tokenizer
from engine.chat.dsml import V41, ToolCall
from engine.chat.dsml_parser import ReplyParser
from engine.chat.form import Conversation
from engine.errors import InvalidRequest
from engine.model.base import check_prompt
from engine.model_path import NANO


def history(arguments: object) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "user", "content": "go"}, {"role": "assistant", "content": None, "tool_calls": [call]}]


@pytest.mark.parametrize(
    "text",
    [
        '{"a": NaN}',
        '{"a": 1e999}',
        '{"a": [-Infinity]}',
        '{"a\\"b": 1}',
        '{"｜DSML｜": 1}',
        "[1",
        '{"\\ud800": 1}',
    ],
)
def test_a_past_call_that_no_tag_can_hold_stands_as_its_text(text: str):
    rendered = load_format("v41").render(history(text), effort=None).text
    block = rendered[rendered.index(V41.opening(V41.block)) :]
    block = block[: block.index(V41.closing(V41.block)) + len(V41.closing(V41.block))]
    parser = ReplyParser(V41, thinking=False)
    calls = [e for e in (*parser.push(block), *parser.finish()) if isinstance(e, ToolCall)]
    assert [call.arguments for call in calls] == [{"arguments": text}]


def test_a_past_call_whose_object_is_no_json_is_refused_by_its_field():
    with pytest.raises(InvalidRequest) as refused:
        load_format("v41").render(history({"a": float("nan")}))
    assert refused.value.parameter == "messages[1].tool_calls[0].function.arguments"
    rendered = load_format("v41").render(history(json.loads('{"a": 3}'))).text
    assert "3" in rendered


def test_half_a_surrogate_pair_is_refused():
    form = DeepseekForm(load_format("v41"), load_tokenizer(NANO))
    with pytest.raises(InvalidRequest, match="half a surrogate pair"):
        form.prompt(Conversation([{"role": "user", "content": "a \ud83d b"}]), 4096)


@pytest.mark.parametrize("token", [1.5, None, "1"])
def test_a_token_id_that_is_no_integer_is_refused(token: Any):
    with pytest.raises(InvalidRequest, match="expected an integer"):
        check_prompt([1, token], 10, 10)


def test_a_model_refuses_it_too():
    model = load_model("nano", threads=1)
    with pytest.raises(InvalidRequest, match=r"a token id is 1\.5"):
        model.logits([1.5])  # pyright: ignore[reportArgumentType]
    model.close()
