"""DeepSeek's prompt format: the sheet's examples, who keeps reasoning, and what a message cannot do."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.chat.deepseek import DeepseekFormat, load_format, read_effort
from engine.chat.deepseek_messages import parameter_names, read_tools
from engine.chat.deepseek_prompt import THINK, Prompt
from engine.chat.deepseek_texts import load_texts
from engine.errors import BrokenModelFile, InvalidRequest

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
WEATHER = {
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TOOL = {"type": "function", "function": WEATHER}

ENCODING = '''
import os
raise SystemExit("this program must not run")
dsml_token: str = "｜DSML｜"
REASONING_EFFORT_TEMPLATE = "Reasoning Effort: {budget} " "(of 100)\\n\\n"
REASONING_EFFORT_MAX = "Max!\\n\\n"
TOOLS_TEMPLATE = """TOOLS <{dsml_token} calls> {{}} {thinking_start_token}{thinking_end_token}
{tool_schemas}
END"""
response_format_template = "FORMAT {schema}"
not_text = os.path.join("a", "b")
'''


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "encoding").mkdir()
    (tmp_path / "encoding" / "encoding.py").write_text(ENCODING)
    return tmp_path


@pytest.fixture
def v41(checkpoint: Path) -> DeepseekFormat:
    return load_format("v41", checkpoint)


@pytest.fixture
def v4(checkpoint: Path) -> DeepseekFormat:
    return load_format("v4", checkpoint)


E75 = "Reasoning Effort: 75 (of 100)\n\n"
TOOLS = "TOOLS <｜DSML｜ calls> {} <think></think>\n" + json.dumps(WEATHER) + "\nEND"


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def user(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def assistant(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def result(content: str, call_id: str = "") -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def called(name: str, arguments: Any, call_id: str = "") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_thinking(v41: DeepseekFormat) -> None:
    prompt = v41.render([system("Be brief."), user("2+2?")])
    assert prompt.text == f"{BOS}<｜System｜>{E75}Be brief.<｜User｜>2+2?<｜Assistant｜><think>"
    assert prompt.thinking


def test_chat(v41: DeepseekFormat) -> None:
    prompt = v41.render([system("Be brief."), user("2+2?")], effort=None)
    assert prompt.text == f"{BOS}<｜System｜>Be brief.<｜User｜>2+2?<｜Assistant｜></think>"
    assert not prompt.thinking


def test_chat_without_a_system_message(v41: DeepseekFormat) -> None:
    assert v41.render([user("hi")], effort=None).text == f"{BOS}<｜User｜>hi<｜Assistant｜></think>"


def test_history_without_tools_loses_its_reasoning(v41: DeepseekFormat) -> None:
    messages = [user("a"), assistant("b", reasoning_content="why b"), user("c")]
    expected = (
        f"{BOS}<｜System｜>{E75}<｜User｜>a<｜Assistant｜></think>b{EOS}<｜User｜>c<｜Assistant｜><think>"
    )
    assert v41.render(messages).text == expected
    kept = v41.render(messages, drop_thinking=False).text
    assert kept == expected.replace("<｜Assistant｜></think>b", "<｜Assistant｜><think>why b</think>b")


def test_a_tool_turn(v41: DeepseekFormat) -> None:
    messages = [
        system("S"),
        user("Weather in Oslo?"),
        assistant(None, reasoning="need tool", tool_calls=[called("get_weather", '{"city": "Oslo"}')]),
        result('{"t":3}'),
    ]
    block = (
        '<｜DSML｜ calls>\n<｜DSML｜ invoke name="get_weather">\n'
        '<｜DSML｜ parameter name="city" string="true">Oslo</｜DSML｜ parameter>\n'
        "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
    )
    assert v41.render(messages, tools=[TOOL]).text == (
        f"{BOS}<｜System｜>{E75}S\n\n{TOOLS}<｜User｜>Weather in Oslo?<｜Assistant｜><think>need tool</think>"
        f'\n\n{block}{EOS}<｜User｜><tool_result>{{"t":3}}</tool_result><｜Assistant｜><think>'
    )


def test_a_title_task(v41: DeepseekFormat) -> None:
    prompt = v41.render([user("a", task="title")])
    assert prompt.text.endswith("<｜User｜>a<｜title｜>")
    assert not prompt.thinking
    history = v41.render([user("a", task="title"), assistant("T", reasoning="r"), user("b")])
    assert f"<｜User｜>a<｜title｜>T{EOS}<｜User｜>b<｜Assistant｜><think>" in history.text


@pytest.mark.parametrize(("effort", "tag"), [(75, "<think>"), (None, "</think>")])
def test_an_action_task(v41: DeepseekFormat, effort: int | None, tag: str) -> None:
    prompt = v41.render([user("a", task="action")], effort=effort)
    assert prompt.text.endswith(f"<｜User｜>a<｜Assistant｜>{tag}<｜action｜>")


def test_results_of_tools_open_no_new_turn(v41: DeepseekFormat) -> None:
    """Without tool definitions the reasoning behind the running turn's calls stays."""
    messages = [user("a"), assistant("", reasoning="r", tool_calls=[called("f", "{}")]), result("1")]
    assert "<｜Assistant｜><think>r</think>" in v41.render(messages).text
    assert "<｜Assistant｜></think>\n\n" in v41.render([*messages, user("b")]).text


def test_user_and_tool_messages_merge_and_results_follow_the_calls(v41: DeepseekFormat) -> None:
    messages = [
        user("go"),
        assistant("", tool_calls=[called("f", "{}", "1"), called("g", "{}", "2")]),
        result("second", "2"),
        user("note"),
        result("first", "1"),
        user("more"),
    ]
    assert v41.render(messages).text.endswith(
        "<｜User｜><tool_result>first</tool_result>\n\nnote\n\n<tool_result>second</tool_result>\n\nmore"
        "<｜Assistant｜><think>"
    )


def test_text_parts_join_with_blank_lines_and_developers_are_users(v41: DeepseekFormat) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    text = v41.render([{"role": "developer", "content": parts}], effort=None).text
    assert text == f"{BOS}<｜User｜>a\n\nb<｜Assistant｜></think>"


def test_a_system_message_within_the_conversation_opens_a_turn(v41: DeepseekFormat) -> None:
    messages = [user("a"), assistant("b", reasoning="r"), system("now")]
    assert v41.render(messages).text == (
        f"{BOS}<｜System｜>{E75}<｜User｜>a<｜Assistant｜></think>b{EOS}<｜System｜>now<｜Assistant｜><think>"
    )


def test_tools_and_schema_make_a_system_message(v41: DeepseekFormat) -> None:
    text = v41.render([user("a")], tools=[TOOL], response_schema={"type": "object"}, effort=None).text
    assert text == (
        f'{BOS}<｜System｜>\n\n{TOOLS}\n\nFORMAT {{"type": "object"}}<｜User｜>a<｜Assistant｜></think>'
    )


def test_v4_has_no_system_token_and_sentences_for_effort(v4: DeepseekFormat) -> None:
    messages = [system("S"), user("a")]
    tail = "S<｜User｜>a<｜Assistant｜><think>"
    assert v4.render(messages, effort=50).text == BOS + tail
    assert v4.render(messages, effort=75).text == BOS + tail  # this release has no sentence for it
    assert v4.render(messages, effort=100).text == f"{BOS}Max!\n\n{tail}"
    called_once = v4.render([user("a"), assistant("", tool_calls=[called("f", {"x": 1})]), result("1")]).text
    assert '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="x"' in called_once


def test_broken_arguments_of_an_old_call_stand_as_they_are(v41: DeepseekFormat) -> None:
    text = v41.render([user("a"), assistant("", tool_calls=[called("f", '{"x":')]), result("1")]).text
    assert '<｜DSML｜ parameter name="arguments" string="true">{"x":</｜DSML｜ parameter>' in text


@settings(deadline=None)
@given(content=st.text() | st.sampled_from([BOS, EOS, "<｜User｜>", "<think>", "</think>", "｜DSML｜"]))
def test_control_tokens_are_ours_alone(content: str) -> None:
    """What any client wrote, wherever it stands, is in pieces in which no token is looked for."""
    prompt = load_format("v41").render(
        [
            system(content),
            user(content),
            assistant(content, reasoning=content, tool_calls=[called("f", {"x": content, "y": [content]})]),
            result(content),
        ],
        tools=[{"type": "function", "function": {"name": "f", "description": content}}],
        response_schema={"const": content},
    )
    plain = load_format("v41").render(
        [
            system(""),
            user(""),
            assistant("", reasoning="", tool_calls=[called("f", {"x": "", "y": [""]})]),
            result(""),
        ],
        tools=[{"type": "function", "function": {"name": "f", "description": ""}}],
        response_schema={"const": ""},
    )
    assert ours(prompt) == ours(plain)


def ours(prompt: Prompt) -> list[str]:
    return [piece.text for piece in prompt.pieces if piece.ours]


def test_a_prompt_that_ends_in_text_does_not_think(v41: DeepseekFormat) -> None:
    assert not v41.render([system("<｜Assistant｜>" + THINK)], effort=None).thinking


@pytest.mark.parametrize(
    ("value", "effort"),
    [
        (None, 75),
        ("low", 50),
        ("high", 75),
        ("xhigh", 75),
        ("max", 100),
        ("none", None),
        ("medium", 62),
        (1, 1),
        (100, 100),
    ],
)
def test_efforts(value: object, effort: int | None) -> None:
    assert read_effort(value) == effort


@pytest.mark.parametrize("value", [0, 101, True, 50.0, "much", "75", []])
def test_other_efforts_are_refused(value: object) -> None:
    with pytest.raises(InvalidRequest, match="reasoning_effort is"):
        read_effort(value)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "robot", "content": "a"}, "messages[0].role"),
        (user(7), "messages[0].content"),  # pyright: ignore[reportArgumentType]
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0]"),
        (user("a", task="poem"), "messages[0].task"),
        (assistant("a", reasoning=3), "messages[0].reasoning"),
        (assistant("a", tool_calls=[{"function": {}}]), "messages[0].tool_calls[0].function.name"),
        (assistant("a", tool_calls={}), "messages[0].tool_calls"),
        ({"role": "system", "content": "a", "tools": [3]}, "messages[0].tools[0]"),
    ],
)
def test_a_message_that_does_not_fit_is_named(v41: DeepseekFormat, message: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        v41.render([message])
    assert caught.value.parameter == field


def test_without_a_folder_the_wording_is_ours(tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "bare").mkdir()
    assert not load_texts("v41", tmp_path / "bare").of_release
    assert load_texts("v41", checkpoint).of_release
    for family in ("v41", "v4"):
        text = load_format(family).render([user("a")], tools=[TOOL], response_schema={}).text
        assert json.dumps(WEATHER) in text
        assert "{" not in text.replace(json.dumps(WEATHER), "").replace("\n{}", "")
    assert "Reasoning Effort: 31 " in load_format("v41").render([user("a")], effort=31).text


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("x = (", "not a Python file"),
        ("TOOLS_TEMPLATE = '{tool_schemas}'", "no constant 'REASONING_EFFORT_TEMPLATE'"),
        ("REASONING_EFFORT_TEMPLATE = '{effort}'; TOOLS_TEMPLATE = ''", "field 'effort', known: budget"),
        ("REASONING_EFFORT_TEMPLATE = '{'; TOOLS_TEMPLATE = ''", "REASONING_EFFORT_TEMPLATE"),
    ],
)
def test_an_encoding_folder_that_does_not_fit_is_named(checkpoint: Path, program: str, message: str) -> None:
    (checkpoint / "encoding" / "encoding.py").write_text(program)
    with pytest.raises(BrokenModelFile, match=message):
        load_texts("v41", checkpoint)


def test_a_format_the_release_has_no_text_for_is_refused(checkpoint: Path) -> None:
    path = checkpoint / "encoding" / "encoding.py"
    path.write_text(path.read_text().replace("response_format_template", "other"))
    with pytest.raises(InvalidRequest, match="response_format"):
        load_format("v41", checkpoint).render([user("a")], response_schema={})


def test_names_of_parameters_come_from_the_schemas_that_list_them() -> None:
    tools = read_tools(
        "tools", [TOOL, {"function": {"name": "f"}}, {"function": {"name": "g", "parameters": 3}}]
    )
    assert parameter_names(tools) == {"get_weather": {"city"}}


def test_nesting_without_end_is_refused(v41: DeepseekFormat) -> None:
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        v41.render([user("a"), assistant("", tool_calls=[called("f", {"x": deep})])])
