"""The openai SDK against the gateway, on a random model: shapes, counts, options and refusals."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from stack import Stack, serving

from engine import Engine, EngineConfig, SamplingParams
from engine.chat.template import ChatTemplate
from engine.chat.tokenizer import ChatTokenizer
from gateway.config import GatewayConfig

HELLO: list[Any] = [{"role": "user", "content": "hello the world"}]
# With temperature 0 and without a seed the answer is fixed.
GREEDY: dict[str, Any] = {"model": "tiny", "messages": HELLO, "temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module", params=[False, True], ids=["one worker", "prefill and decode"])
def stack(
    request: pytest.FixtureRequest,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    cpu_library: Path,
) -> Iterator[Stack]:
    config = GatewayConfig(max_body_bytes=20_000, default_max_tokens=10)
    with serving(
        tiny_model, tmp_path_factory.mktemp("s"), disaggregated=request.param, gateway=config
    ) as running:
        yield running
        running.wait_until_idle()


@pytest.fixture
def sdk(stack: Stack) -> Iterator[openai.OpenAI]:
    with stack.sdk() as client:
        yield client


@pytest.fixture(scope="module")
def expected(tiny_model: Path, cpu_library: Path, tiny_tokenizer: ChatTokenizer) -> str:
    engine = Engine(EngineConfig(model=str(tiny_model), threads=1, kv_cache_bytes=8 << 20))
    template = ChatTemplate(engine.model.file.require("tokenizer.chat_template"), {})
    return engine.generate([template.render(HELLO)], SamplingParams(max_tokens=24))[0]


def test_a_whole_answer(sdk: openai.OpenAI, expected: str, tiny_tokenizer: ChatTokenizer) -> None:
    answer = sdk.chat.completions.create(**GREEDY)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected)
    assert choice.finish_reason in ("length", "stop")
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    prompt = tiny_tokenizer.encode("<|im_start|>user\nhello the world<|im_end|>\n<|im_start|>assistant\n")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.total_tokens == len(prompt) + answer.usage.completion_tokens
    if choice.finish_reason == "length":
        assert answer.usage.completion_tokens == 24


def test_a_stream_is_the_same_text(sdk: openai.OpenAI, expected: str) -> None:
    chunks = list(sdk.chat.completions.create(**GREEDY, stream=True, stream_options={"include_usage": True}))
    *body, last = chunks
    texts = [chunk.choices[0].delta.content or "" for chunk in body]
    assert "".join(texts) == expected
    assert body[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason is not None for chunk in body] == [False] * (len(body) - 1) + [
        True
    ]
    assert len({chunk.id for chunk in chunks}) == 1
    assert last.choices == []
    assert last.usage == sdk.chat.completions.create(**GREEDY).usage.model_copy(
        update={"prompt_tokens_details": last.usage.prompt_tokens_details}
    )


def test_no_usage_chunk_unless_asked(sdk: openai.OpenAI) -> None:
    chunks = list(sdk.chat.completions.create(**GREEDY, stream=True))
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)


def test_the_timeline_is_consecutive(stack: Stack, sdk: openai.OpenAI) -> None:
    extension = sdk.chat.completions.create(**GREEDY).model_extra["dockyard"]
    timeline = extension["timeline"]
    kinds = [stage["kind"] for stage in timeline]
    assert kinds[-1] == "model.decode"
    assert "model.prefill" in kinds
    assert ("model.transfer" in kinds) == (len(stack.workers) == 2)
    ends = [stage["end_ns"] for stage in timeline]
    assert [stage["start_ns"] for stage in timeline[1:]] == ends[:-1]


def test_choices_are_those_of_their_seeds(sdk: openai.OpenAI) -> None:
    asked = {**GREEDY, "temperature": 1.0}
    both = sdk.chat.completions.create(**asked, n=2, seed=5)
    alone = [sdk.chat.completions.create(**asked, seed=seed).choices[0].message.content for seed in (5, 6)]
    assert [choice.index for choice in both.choices] == [0, 1]
    assert [choice.message.content for choice in both.choices] == alone
    assert alone[0] != alone[1]
    streamed = {0: "", 1: ""}
    for chunk in sdk.chat.completions.create(**asked, n=2, seed=5, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert list(streamed.values()) == alone


def test_without_a_seed_two_requests_differ(sdk: openai.OpenAI) -> None:
    asked = {**GREEDY, "temperature": 1.5}
    texts = {sdk.chat.completions.create(**asked).choices[0].message.content for _ in range(3)}
    assert len(texts) > 1


def test_forced_text_comes_back_exactly(sdk: openai.OpenAI, tiny_tokenizer: ChatTokenizer) -> None:
    text = 'Tool call:\n\t{"cmd": "ls"}\n漢字 😀 the end  '
    answer = sdk.chat.completions.create(**GREEDY, extra_body={"dockyard": {"forced_text": text}})
    assert answer.choices[0].message.content == text
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(tiny_tokenizer.encode(text))


@pytest.mark.parametrize(("stop", "text"), [("the", "say "), (["x", "e e"], "say th"), ([], "say the end")])
def test_stop_strings_cut(sdk: openai.OpenAI, stop: Any, text: str) -> None:
    extra = {"dockyard": {"forced_text": "say the end"}}
    answer = sdk.chat.completions.create(**GREEDY, stop=stop, extra_body=extra)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (text, "stop")
    stream = sdk.chat.completions.create(**GREEDY, stop=stop, extra_body=extra, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text


def test_keys_that_we_do_not_know_are_ignored(sdk: openai.OpenAI, expected: str) -> None:
    extra = {"reasoning_effort": "high", "metadata": {"a": "b"}, "x-foo": [1]}
    answer = sdk.chat.completions.create(**GREEDY, user="me", parallel_tool_calls=True, extra_body=extra)
    assert answer.choices[0].message.content == expected


def test_parts_and_the_newer_name_of_max_tokens(sdk: openai.OpenAI, expected: str) -> None:
    parts = [{"type": "text", "text": "hello "}, {"type": "text", "text": "the world"}]
    answer = sdk.chat.completions.create(
        model="anything",
        messages=[{"role": "user", "content": parts}],
        temperature=0,
        max_completion_tokens=24,
    )
    assert answer.choices[0].message.content == expected


@pytest.mark.parametrize(
    ("changes", "parameter", "words"),
    [
        ({"messages": []}, "messages", "messages is empty"),
        ({"messages": "hi"}, "messages", "Expected `array`"),
        ({"messages": [{"content": "x"}]}, "messages[0]", "role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "image_url"),
        (
            {"messages": [{"role": "user", "content": "hello " * 500}]},
            "messages",
            "maximum context length is 512 tokens",
        ),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0"),
        ({"max_tokens": -5}, "max_tokens", "max_tokens is -5"),
        ({"max_tokens": 10**30}, "messages", "length is 512 tokens"),
        ({"max_tokens": "many"}, "max_tokens", "Expected `int"),
        ({"max_tokens": 500}, "messages", "length is 512 tokens"),
        ({"temperature": 3}, "temperature", "temperature is 3"),
        ({"temperature": -0.1}, "temperature", "between 0 and 2"),
        ({"temperature": "hot"}, "temperature", "Expected `float"),
        ({"top_p": 0}, "top_p", "top_p is 0"),
        ({"n": 0}, "n", "n is 0"),
        ({"n": 1000}, "n", "between 1 and 16"),
        ({"seed": 2**70}, "seed", "seed is"),
        ({"seed": 1.5}, "seed", "Expected `int"),
        ({"priority": 2**70}, "priority", "priority is"),
        ({"top_k": 2**70}, "top_k", "top_k is"),
        ({"stop": ["x"] * 17}, "stop", "17 strings"),
        ({"stop": 5}, "stop", "stop"),
        ({"stream": "yes"}, "stream", "Expected `bool"),
        ({"seed": 2**62 + 1}, "seed", "between -4611686018427387904 and 4611686018427387904"),
        ({"functions": [{"name": "f"}]}, "functions", "functions is not supported by this server yet"),
        ({"prompt_logprobs": 21, "stream": False}, "prompt_logprobs", "prompt_logprobs is 21"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "the answer is a stream"),
        ({"bad_words": ["x"]}, "bad_words", "not supported"),
        ({"tools": [{"type": "function"}]}, "tools[0]", "this server calls functions"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tool_choice": "some"}, "tool_choice", "must be none, auto, required"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "names 'f'"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "response_format.type is 'xml'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "has no schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format.json_schema.schema",
            "schema has 'not', which is not supported",
        ),
        ({"structured_outputs": {"regex": "a(b"}}, "structured_outputs.regex", "parenthesis is not closed"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar", "cannot be compiled"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "none"),
        (
            {"structured_outputs": {"json": r'{"properties": {"\ud800": {"not": {}}}}'}},
            "structured_outputs.json",
            "half a surrogate pair",
        ),
        ({"structured_outputs": {"regex": "(={0,40}){0,40}b"}}, "structured_outputs.regex", "long to follow"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs.regex",
            "both say what the text must be",
        ),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs is not true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs is 21"),
        ({"frequency_penalty": 2.5}, "frequency_penalty", "between -2 and 2"),
        ({"presence_penalty": -3}, "presence_penalty", "presence_penalty is -3"),
        ({"repetition_penalty": 0}, "repetition_penalty", "repetition_penalty is 0"),
        ({"min_p": 2}, "min_p", "min_p is 2"),
        ({"min_tokens": 30}, "min_tokens", "min_tokens is 30, more than max_tokens, 24"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "no token id"),
        ({"logit_bias": {"": 1}}, "logit_bias", "no token id"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "outside the vocabulary"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "logit_bias.5 is 101"),
        ({"stop_token_ids": [99999]}, "stop_token_ids", "outside the vocabulary"),
        ({"reasoning_effort": 101}, "reasoning_effort", "1 to 100"),
        ({"reasoning_effort": "much"}, "reasoning_effort", "'much'"),
        ({"dockyard": {"forced_text": ""}}, "dockyard.forced_text", "forced_text is empty"),
        ({"dockyard": {"forced_text": "x" * 600}}, "messages", "length is 512 tokens"),
    ],
)
def test_bad_requests_are_refused_by_name(
    sdk: openai.OpenAI, stack: Stack, changes: dict[str, Any], parameter: str, words: str
) -> None:
    for stream in (False, True):
        body = {**GREEDY, "stream": stream, **changes}
        answer = httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=30)
        error = answer.json()["error"]
        assert answer.status_code == 400, answer.text
        assert words in error["message"]
        assert error["param"] == parameter
        assert error["type"] == "invalid_request_error"


def test_the_sdk_sees_a_bad_request(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature is 3") as refused:
        sdk.chat.completions.create(**{**GREEDY, "temperature": 3})
    assert refused.value.param == "temperature"


@pytest.mark.parametrize(
    "changes",
    [
        {"messages": [{"role": "user", "content": "hello " * 500}]},
        {"max_tokens": 500},
        {"messages": [{"role": "user"}] * 600},
        {"messages": [{"role": "user", "content": "x" * 19_000}]},
    ],
)
def test_clients_know_a_context_that_is_exceeded(sdk: openai.OpenAI, changes: dict[str, Any]) -> None:
    """By OpenAI's code, and by the words that LiteLLM and agents look for."""
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.chat.completions.create(**{**GREEDY, **changes})
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")
    assert "this model's maximum context length is 512 tokens" in str(refused.value).lower()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[]", "Expected `object`"),
        (b"x" * 20_001, "exceeds"),
    ],
)
def test_a_body_that_is_none_is_refused(stack: Stack, content: bytes, words: str) -> None:
    answer = httpx.post(f"{stack.url}/v1/chat/completions", content=content)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_what_asks_for_nothing_is_no_request_for_what_is_not_done(sdk: openai.OpenAI, expected: str) -> None:
    nothing: dict[str, Any] = {
        "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "logprobs": False,
        "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0, "top_logprobs": None,
        "functions": [], "modalities": ["text"], "echo": False, "min_p": 0, "repetition_penalty": 1,
        "use_beam_search": False, "skip_special_tokens": True, "add_special_tokens": False,
        "chat_template_kwargs": {}, "add_generation_prompt": True, "documents": [], "guided_json": None,
    }  # fmt: skip
    answer = sdk.chat.completions.create(**GREEDY, extra_body=nothing)
    assert answer.choices[0].message.content == expected


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("GET", "/", 404, "not_found"),
        ("GET", "/openapi.json", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method"),
    ],
)
def test_what_is_not_there_is_told_in_the_apis_shape(
    stack: Stack, method: str, path: str, status: int, code: str
) -> None:
    answer = httpx.request(method, f"{stack.url}{path}")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code)
    assert path in error["message"]


def test_the_pages_beside_it(stack: Stack, sdk: openai.OpenAI) -> None:
    (model,) = sdk.models.list().data
    assert (model.id, model.model_extra["max_model_len"]) == ("tiny", 512)
    assert httpx.get(f"{stack.url}/health").status_code == 200
    metrics = httpx.get(f"{stack.url}/metrics").text
    for gauge in ("running", "waiting"):
        assert f'vllm:num_requests_{gauge}{{model_name="tiny"}} 0.0' in metrics
    roles = httpx.get(f"{stack.url}/dockyard/status").json()["workers"]
    assert roles == [worker.engine.config.role for worker in stack.workers]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_counts_once_however_many_choices_it_has(
    stack: Stack, sdk: openai.OpenAI, stream: bool
) -> None:
    prompt, ended = metric(stack, "vllm:prompt_tokens_total"), metric(stack, "vllm:request_success_total")
    usage = sdk.chat.completions.create(**GREEDY).usage
    assert usage is not None
    body = {**GREEDY, "n": 3, "stream": stream}
    assert httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=60).status_code == 200
    assert metric(stack, "vllm:prompt_tokens_total") - prompt == 2 * usage.prompt_tokens
    assert metric(stack, "vllm:request_success_total") - ended == 1 + 3


def metric(stack: Stack, name: str) -> float:
    """The sum over all labels."""
    lines = httpx.get(f"{stack.url}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))


def test_a_worker_is_slowed_down_by_name(stack: Stack) -> None:
    role = stack.workers[0].engine.config.role
    assert httpx.post(f"{stack.url}/dockyard/workers/{role}/pace", json={"factor": 2}).json() == {
        "role": role,
        "factor": 2.0,
    }
    assert stack.paces == {role: 2.0}
    assert httpx.post(f"{stack.url}/dockyard/workers/none/pace", json={"factor": 2}).status_code == 404
    for bad in ({"factor": 0.5}, {"factor": 101}, {"factor": "x"}, {}, {"factor": 2, "other": 1}):
        assert httpx.post(f"{stack.url}/dockyard/workers/{role}/pace", json=bad).status_code == 400
