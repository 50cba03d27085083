"""Sampling, structured output, tools and logprobs through the openai SDK, on a random model."""

import concurrent.futures
import json
import math
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from stack import Stack, serving
from tiny_gguf import byte_ids, write_tiny_gguf

from engine.chat.tokenizer import ChatTokenizer
from gateway.config import GatewayConfig

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
ASKED: dict[str, Any] = {"model": "tiny", "messages": HELLO, "temperature": 1.0, "seed": 7, "max_tokens": 200}
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "greet", "description": "Says hello.", "parameters": PERSON}},
    {"type": "function", "function": {"name": "count", "parameters": {
        "type": "object", "properties": {"to": {"enum": [1, 2, 3]}}, "required": ["to"]}}},
]  # fmt: skip


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Descriptions of tools take a thousand of its tokens, most of which are bytes."""
    return write_tiny_gguf(tmp_path_factory.mktemp("m") / "m.gguf", metadata={"llama.context_length": 2048})


@pytest.fixture(scope="module", params=[False, True], ids=["one worker", "prefill and decode"])
def stack(
    request: pytest.FixtureRequest,
    long_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    cpu_library: Path,
) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("s")
    with serving(long_model, folder, disaggregated=request.param, gateway=GatewayConfig()) as running:
        yield running
        running.wait_until_idle()


@pytest.fixture
def sdk(stack: Stack) -> Iterator[openai.OpenAI]:
    with stack.sdk() as client:
        yield client


@pytest.mark.parametrize("seed", range(3))
def test_a_schema_holds(sdk: openai.OpenAI, seed: int) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    answer = sdk.chat.completions.create(**{**ASKED, "seed": seed, "max_tokens": 400}, response_format=schema)
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    person = json.loads(choice.message.content)
    assert set(person) == {"name", "age"}
    assert 1 <= person["age"] <= 99
    assert len(person["name"]) <= 6


def test_a_pydantic_model_comes_back(sdk: openai.OpenAI) -> None:
    import pydantic

    class Person(pydantic.BaseModel):
        age: int = pydantic.Field(ge=1, le=99)
        happy: bool

    answer = sdk.chat.completions.parse(**ASKED, response_format=Person)
    assert isinstance(answer.choices[0].message.parsed, Person)


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        ({"regex": "[a-c]{3,5}!"}, "[a-c]{3,5}!"),
        ({"choice": ["yes", "no", "é漢"]}, "yes|no|é漢"),
        ({"grammar": 'root ::= "x" root | "y"'}, "x*y"),
        ({"json": {"enum": [1, 2]}}, "[12]"),
        ({"json": '{"enum": [1, 2]}'}, "[12]"),
    ],
)
def test_vllms_structured_outputs_hold(sdk: openai.OpenAI, outputs: dict[str, Any], pattern: str) -> None:
    answer = sdk.chat.completions.create(**ASKED, extra_body={"structured_outputs": outputs})
    (choice,) = answer.choices
    if choice.finish_reason == "stop":
        assert re.fullmatch(pattern, choice.message.content)
    else:
        assert re.fullmatch("x*", choice.message.content)


def test_every_choice_holds_to_the_structure(sdk: openai.OpenAI) -> None:
    extra = {"structured_outputs": {"regex": "[a-z]{8}"}}
    answer = sdk.chat.completions.create(**ASKED, n=4, extra_body=extra)
    texts = [choice.message.content for choice in answer.choices]
    assert all(re.fullmatch("[a-z]{8}", text) for text in texts)
    assert len(set(texts)) > 1


def test_a_required_tool_is_called(sdk: openai.OpenAI) -> None:
    asked = {
        **ASKED,
        "max_tokens": 300,
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    (choice,) = sdk.chat.completions.create(**asked).choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert choice.message.content is None
    assert call.id.startswith("call_")
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == ({"name", "age"} if call.function.name == "greet" else {"to"})


def test_a_named_tool_is_called_and_streamed(sdk: openai.OpenAI) -> None:
    choice = {"type": "function", "function": {"name": "count"}}
    chunks = list(sdk.chat.completions.create(**ASKED, tools=TOOLS, tool_choice=choice, stream=True))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert [(call.index, call.function.name) for call in calls] == [(0, "count")]
    assert json.loads(calls[0].function.arguments)["to"] in (1, 2, 3)
    assert chunks[-1].choices[0].finish_reason == "stop"  # as OpenAI, where the tool was named
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ""


def test_what_the_model_writes_as_a_call_is_one(sdk: openai.OpenAI) -> None:
    text = 'I call.\n<tool_call>\n{"name": "count", "arguments": {"to": 2}}\n</tool_call>'
    extra = {"dockyard": {"forced_text": text}}
    (choice,) = sdk.chat.completions.create(**ASKED, tools=TOOLS, extra_body=extra).choices
    assert choice.message.content == "I call."
    assert choice.finish_reason == "tool_calls"
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"to": 2}
    (plain,) = sdk.chat.completions.create(**ASKED, tools=TOOLS, tool_choice="none", extra_body=extra).choices
    assert (plain.message.content, plain.message.tool_calls, plain.finish_reason) == (text, None, "stop")


def test_a_conversation_with_calls_and_results_goes_on(sdk: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "count", "arguments": '{"to": 1}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "<|im_end|>1"},
    ]
    answer = sdk.chat.completions.create(**{**ASKED, "messages": messages, "max_tokens": 5}, tools=TOOLS)
    assert answer.usage.completion_tokens > 0


def test_logprobs_are_those_of_the_tokens(sdk: openai.OpenAI, tiny_tokenizer: ChatTokenizer) -> None:
    asked = {**ASKED, "max_tokens": 12, "logprobs": True, "top_logprobs": 4}
    (choice,) = sdk.chat.completions.create(**asked, extra_body={"ignore_eos": True}).choices
    entries = choice.logprobs.content
    assert len(entries) == 12
    data = b"".join(bytes(entry.bytes) for entry in entries)
    assert choice.message.content.encode() == data.decode(errors="replace").encode() or b"<|" in data
    for entry in entries:
        assert len(entry.top_logprobs) == 4
        assert entry.logprob <= entry.top_logprobs[0].logprob <= 0
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1.0
    streamed = sdk.chat.completions.create(**asked, extra_body={"ignore_eos": True}, stream=True)
    told = [entry for chunk in streamed for entry in (chunk.choices[0].logprobs or _NONE).content]
    assert told == entries


def test_logprobs_of_the_prompt_are_told_on_request(sdk: openai.OpenAI) -> None:
    asked = {**ASKED, "max_tokens": 3}
    answer = sdk.chat.completions.create(**asked, n=2, extra_body={"prompt_logprobs": 2})
    told = answer.model_extra["prompt_logprobs"]
    assert len(told) == answer.usage.prompt_tokens
    assert told[0] is None
    for entries in told[1:]:
        assert 2 <= len(entries) <= 3
        ranked = sorted(entries.values(), key=lambda entry: entry["rank"])
        assert [entry["rank"] for entry in ranked[:2]] == [1, 2]
        assert ranked[0]["logprob"] >= ranked[1]["logprob"]
    assert "prompt_logprobs" not in sdk.chat.completions.create(**asked).model_extra


class _NONE:
    content: tuple[Any, ...] = ()


def test_bias_decides(sdk: openai.OpenAI) -> None:
    (token,) = byte_ids(b"z")
    asked = {**ASKED, "max_tokens": 5, "logit_bias": {str(token): 100}}
    assert sdk.chat.completions.create(**asked).choices[0].message.content == "zzzzz"


def test_penalties_spread_the_tokens(sdk: openai.OpenAI) -> None:
    ids = {str(token): 60.0 for token in byte_ids(b"abcdefgh")}
    asked = {**ASKED, "temperature": 0, "max_tokens": 8, "logit_bias": ids}
    plain = sdk.chat.completions.create(**asked).choices[0].message.content
    spread = sdk.chat.completions.create(**asked, presence_penalty=2.0, frequency_penalty=2.0)
    assert len(set(spread.choices[0].message.content)) >= len(set(plain))


def test_stop_tokens_and_strings_say_what_has_stopped(sdk: openai.OpenAI) -> None:
    (token,) = byte_ids(b"z")
    bias = {**ASKED, "max_tokens": 9, "logit_bias": {str(token): 100}}
    (by_id,) = sdk.chat.completions.create(
        **bias, extra_body={"stop_token_ids": [token], "min_tokens": 1}
    ).choices
    assert by_id.finish_reason == "stop"
    assert by_id.model_extra["stop_reason"] == token
    extra = {"dockyard": {"forced_text": "say the end"}}
    (by_text,) = sdk.chat.completions.create(**ASKED, stop=["the"], extra_body=extra).choices
    assert (by_text.message.content, by_text.model_extra["stop_reason"]) == ("say ", "the")
    kept = {**extra, "include_stop_str_in_output": True}
    (with_it,) = sdk.chat.completions.create(**ASKED, stop=["the"], extra_body=kept).choices
    assert with_it.message.content == "say the"


@pytest.mark.parametrize("effort", [1, 100, "low", "medium", "max", "none"])
def test_efforts_are_taken(sdk: openai.OpenAI, effort: Any) -> None:
    answer = sdk.chat.completions.create(
        **{**ASKED, "max_tokens": 2}, extra_body={"reasoning_effort": effort}
    )
    assert answer.usage.completion_tokens > 0


def test_the_prompt_of_several_choices_is_computed_once(stack: Stack, sdk: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "once upon a time, " * 12}]
    before = num_rows(stack)
    asked = {**ASKED, "messages": messages, "max_tokens": 4}
    answer = sdk.chat.completions.create(**asked, n=4, extra_body={"ignore_eos": True})
    assert len(answer.choices) == 4
    assert answer.usage.completion_tokens == 16
    assert (
        num_rows(stack) - before == answer.usage.prompt_tokens + 4 * 3
    )  # the last token of each runs nowhere


def num_rows(stack: Stack) -> int:
    return sum(worker.call(worker.engine.statistics).rows for worker in stack.workers)


def test_a_choice_that_has_come_to_a_stop_string_ends_alone(stack: Stack, sdk: openai.OpenAI) -> None:
    """The others go on; the engine does not go on with it."""
    (token,) = byte_ids(b"z")
    asked = {**ASKED, "max_tokens": 150, "logit_bias": {str(token): 4}, "stop": ["z"]}
    answer = sdk.chat.completions.create(**asked, n=3, extra_body={"ignore_eos": True})
    assert all("z" not in choice.message.content for choice in answer.choices)
    assert any(choice.finish_reason == "stop" for choice in answer.choices)
    stack.wait_until_idle()


def test_a_full_queue_says_when_to_come_again(tiny_model: Path, tmp_path: Path, cpu_library: Path) -> None:
    with serving(tiny_model, tmp_path, max_waiting=1, max_sequences=1) as stack:
        body = {**ASKED, "max_tokens": 400, "ignore_eos": True, "stream": True}
        with ExitStack() as open_streams:
            answers = [
                open_streams.enter_context(
                    httpx.stream("POST", f"{stack.url}/v1/chat/completions", json=body, timeout=60)
                )
                for _ in range(1)
            ]
            stack.wait_until_running(1)
            with concurrent.futures.ThreadPoolExecutor(6) as pool:
                whole = {**body, "stream": False, "max_tokens": 1}
                url = f"{stack.url}/v1/chat/completions"
                others = list(pool.map(lambda _: httpx.post(url, json=whole, timeout=60), range(6)))
            assert answers[0].status_code == 200
        refused = [answer for answer in others if answer.status_code == 429]
        assert refused
        for answer in refused:
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["type"] == "rate_limit_exceeded"
        stack.wait_until_idle()


def test_a_grammar_that_takes_long_holds_nobody_up_and_its_client_may_leave(stack: Stack) -> None:
    wide = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(2500)}}
    schema = {"type": "json_schema", "json_schema": {"schema": wide}}
    url, asked = f"{stack.url}/v1/chat/completions", {**ASKED, "max_tokens": 2}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        refused = pool.submit(httpx.post, url, json={**asked, "response_format": schema}, timeout=60)
        left = pool.submit(httpx.post, url, json={**asked, "response_format": schema}, timeout=0.5)
        quick = [httpx.post(url, json=asked, timeout=60) for _ in range(3)]
        assert not refused.done()
        assert [answer.status_code for answer in quick] == [200] * 3
        with pytest.raises(httpx.ReadTimeout):
            left.result()
        answer = refused.result()
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format.json_schema.schema"
    assert "it takes more" in answer.json()["error"]["message"]  # than 5 s, or than its memory
    stack.wait_until_idle()
