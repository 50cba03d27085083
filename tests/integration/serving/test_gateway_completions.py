"""Texts that go on: /v1/completions with the openai client, before a real engine."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from stack import Stack, serving
from tiny_gguf import byte_ids

from engine import Engine, EngineConfig, SamplingParams
from engine.chat.tokenizer import ChatTokenizer
from gateway.merging import merged

ASKED: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 8}
TEXTS = ["hello", "the other one", "é"]


@pytest.fixture(scope="module", params=[False, True], ids=["one worker", "prefill and decode"])
def stack(
    request: pytest.FixtureRequest,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    cpu_library: Path,
) -> Iterator[Stack]:
    with serving(tiny_model, tmp_path_factory.mktemp("s"), disaggregated=request.param) as running:
        yield running
        running.wait_until_idle()


@pytest.fixture
def sdk(stack: Stack) -> Iterator[openai.OpenAI]:
    with stack.sdk() as client:
        yield client


@pytest.fixture(scope="module")
def expected(tiny_model: Path, cpu_library: Path) -> list[str]:
    engine = Engine(EngineConfig(model=str(tiny_model), threads=1, kv_cache_bytes=8 << 20))
    texts = engine.generate(TEXTS, SamplingParams(max_tokens=8))
    engine.close()
    return texts


def test_prompts_are_texts_or_ids_or_several(sdk: openai.OpenAI, expected: list[str]) -> None:
    ids = [byte_ids(b"hello"), byte_ids("é".encode())]
    one = sdk.completions.create(**ASKED, prompt=TEXTS[0])
    assert one.object == "text_completion"
    assert one.choices[0].text == expected[0]
    many = sdk.completions.create(**ASKED, prompt=TEXTS)
    assert [choice.index for choice in many.choices] == [0, 1, 2]
    assert [choice.text for choice in many.choices] == expected
    of_ids = sdk.completions.create(**ASKED, prompt=ids)
    assert len(of_ids.choices) == 2
    assert of_ids.choices[1].text == sdk.completions.create(**ASKED, prompt=ids[1]).choices[0].text


def test_choices_of_several_prompts_are_numbered_by_prompt(sdk: openai.OpenAI) -> None:
    fields = {**ASKED, "temperature": 1.0, "seed": 5, "n": 2, "max_tokens": 6}
    both = sdk.completions.create(**fields, prompt=TEXTS[:2])
    each = [sdk.completions.create(**fields, prompt=text) for text in TEXTS[:2]]
    assert [c.text for c in both.choices] == [c.text for answer in each for c in answer.choices]
    assert both.usage.prompt_tokens == sum(answer.usage.prompt_tokens for answer in each)
    assert both.usage.completion_tokens == 24


def test_a_stream_gives_what_the_whole_answer_has(sdk: openai.OpenAI) -> None:
    whole = sdk.completions.create(**ASKED, prompt=TEXTS, logprobs=1)
    texts = [""] * 3
    tokens: list[list[str]] = [[], [], []]
    offsets: list[list[int]] = [[], [], []]
    last: Any = None
    options: Any = {"include_usage": True}
    for chunk in sdk.completions.create(
        **ASKED, prompt=TEXTS, logprobs=1, stream=True, stream_options=options
    ):
        last = chunk
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.logprobs is not None:
                tokens[choice.index] += choice.logprobs.tokens
                offsets[choice.index] += choice.logprobs.text_offset
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs.tokens for choice in whole.choices]
    assert offsets == [choice.logprobs.text_offset for choice in whole.choices]
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_logprobs_stand_beside_each_other(sdk: openai.OpenAI, tiny_tokenizer: ChatTokenizer) -> None:
    (choice,) = sdk.completions.create(**ASKED, prompt="hello", logprobs=3).choices
    told = choice.logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(told.text_offset)
    for token, logprob, top in zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True):
        assert top[token] == logprob == max(top.values())
    (silent,) = sdk.completions.create(**ASKED, prompt="hello").choices
    assert silent.logprobs is None


def test_a_stop_string_and_a_schema_hold(sdk: openai.OpenAI) -> None:
    (whole,) = sdk.completions.create(**ASKED, prompt="hello").choices
    end = whole.text[3:5]
    (cut,) = sdk.completions.create(**ASKED, prompt="hello", stop=[end]).choices
    assert cut.text == whole.text[: whole.text.index(end)]
    assert (cut.finish_reason, cut.model_extra["stop_reason"]) == ("stop", end)
    (formed,) = sdk.completions.create(
        **ASKED, prompt="hello", extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    ).choices
    assert formed.text in ("yes", "no")


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"prompt": "a" * 100_000}, "prompt"),
        ({"prompt": "a", "max_tokens": 100_000}, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "n": 17}, "n"),
        ({"prompt": ["a", [2**31 - 1]], "max_tokens": 2}, "prompt"),
        ({"prompt": [2**31 - 1], "max_tokens": 2}, "prompt_ids"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    stack: Stack, sdk: openai.OpenAI, fields: dict[str, Any], parameter: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.completions.create(model="tiny", **fields)
    assert refused.value.param == parameter
    stack.wait_until_idle()


def test_one_prompt_that_fails_ends_the_others(stack: Stack, sdk: openai.OpenAI) -> None:
    prompts = [byte_ids(b"hello"), [2**31 - 1]]
    for stream in (False, True):
        with pytest.raises(openai.APIError):
            list(sdk.completions.create(model="tiny", prompt=prompts, max_tokens=400, stream=stream))
        stack.wait_until_idle()


def test_a_client_that_leaves_a_stream_ends_all_prompts(stack: Stack, sdk: openai.OpenAI) -> None:
    stream = sdk.completions.create(model="tiny", prompt=TEXTS, max_tokens=400, stream=True)
    next(iter(stream))
    stream.close()
    stack.wait_until_idle()


def test_streams_are_merged_in_their_order_and_closed_together() -> None:
    closed: list[int] = []

    async def numbers(which: int, count: int) -> AsyncGenerator[tuple[int, int]]:
        try:
            for number in range(count):
                await asyncio.sleep(0)
                yield which, number
        finally:
            closed.append(which)

    async def main() -> None:
        found = [item async for item in merged([numbers(0, 3), numbers(1, 0), numbers(2, 5)])]
        assert [n for which, n in found if which == 0] == [0, 1, 2]
        assert [n for which, n in found if which == 2] == [0, 1, 2, 3, 4]
        assert sorted(closed) == [0, 1, 2]
        endless = merged([numbers(3, 10**9), numbers(4, 10**9)])
        await anext(endless)
        await endless.aclose()
        assert sorted(closed) == [0, 1, 2, 3, 4]

    asyncio.run(main())
