"""What users of other serving stacks complained about, where it concerns one engine or one pair of workers.

Tests are named after the complaint; docs/serving-complaints.md lists all of them, with those that other files
have.
"""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from engine_runs import finish, small_engine
from stack import PATIENCE_S, Stack, serving
from tiny_gguf import byte_ids

from engine import Engine, EngineConfig, Request, SamplingParams
from engine.chat.deepseek_prompt import THOUGHT
from engine.chat.deepseek_tokenizer import load_tokenizer
from engine.chat.dsml import V41, ToolCall, render_calls
from engine.model_path import model_path

Make = Callable[..., AbstractContextManager[Stack]]
GOLDEN = Path(__file__).parents[2] / "data" / "v41_golden" / "b"
SAID: list[Any] = [{"role": "user", "content": "hello"}]
LONG: dict[str, Any] = {
    "model": "tiny", "messages": SAID, "max_tokens": 400, "dockyard": {"forced_text": "x" * 400},
}  # fmt: skip


@pytest.fixture
def make(tiny_model: Path, tmp_path: Path, cpu_library: Path) -> Make:
    return lambda **settings: serving(tiny_model, tmp_path, **settings)


# ---------------------------------------------------------------- PD hand-off and KV leaks
def test_c1_an_abort_while_decode_has_the_kv_waiting_and_prefill_dies_frees_the_blocks(make: Make) -> None:
    """The second request's hand-off waits behind the first, which holds the one place that there is."""
    with make(disaggregated=True, max_sequences=1) as stack:
        prefill, decode = stack.workers
        decode.set_pace(20)
        threads = [threading.Thread(target=leave_soon, args=(stack,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        stack.wait_until(lambda: stack.num_queued(decode) == 2, "two hand-offs, of which one waits")
        prefill.stop()
        for thread in threads:
            thread.join(PATIENCE_S)
        stack.wait_until(lambda: stack.num_queued(decode) == 0, "an idle decode worker")
        decode.call(decode.check_integrity)
        assert decode.call(decode.engine.statistics).pool.held == 0


def leave_soon(stack: Stack) -> None:
    """A client that has no patience, and is told or not."""
    with suppress(httpx.HTTPError):
        httpx.post(f"{stack.url}/v1/chat/completions", json=LONG, timeout=httpx.Timeout(PATIENCE_S, read=3.0))


class HandClock:
    def __init__(self) -> None:
        self.ns = 1_000_000_000

    def now_ns(self) -> int:
        self.ns += 1_000
        return self.ns


def test_c8_after_an_idle_hour_one_request_is_served_as_before(cpu_library: Path) -> None:
    """Windows in host memory have expired by then; leases of a connection do not exist."""
    clock = HandClock()
    config = {"model": str(GOLDEN), "threads": 1, "kv_cache_bytes": 1 << 20}
    prefill, decode = (
        Engine(EngineConfig.model_validate({**config, "role": role}), clock) for role in ("prefill", "decode")
    )
    ids = tuple(json.loads((GOLDEN / "ids.json").read_text())[:60])
    request = SamplingParams(max_tokens=5, ignore_eos=True)

    def run(name: str) -> list[int]:
        prefill.add(Request(name, ids, request))
        found: list[int] = []
        while prefill.has_work or decode.has_work:
            for engine in (prefill, decode):
                result = engine.step()
                found += [token for output in result.tokens for token in output.token_ids]
                for handoff in result.handoffs:
                    decode.adopt(handoff)
                engine.check_integrity()
        return found

    first = run("first")
    clock.ns += 3_600 * 10**9
    assert len(first) == 5
    again = run("again")
    fresh = small_engine(GOLDEN, kv_cache_bytes=1 << 20)
    lineage = finish(fresh, [Request("r", ids, request)])["r"]
    assert first == list(lineage)
    assert len(again) == 5
    assert prefill.statistics().tiers.windows.expired > 0
    for engine in (prefill, decode, fresh):
        engine.close()


@pytest.mark.parametrize("sizes", [(16, 8), (8, 16), (4, 32)])
def test_c10_workers_with_blocks_of_other_sizes_work_together(
    tiny_model: Path, cpu_library: Path, sizes: tuple[int, int]
) -> None:
    prefill = small_engine(tiny_model, role="prefill", block_tokens=sizes[0])
    decode = small_engine(tiny_model, role="decode", block_tokens=sizes[1])
    request = Request("r", tuple(byte_ids(b"hello the world " * 5)), SamplingParams(max_tokens=9))
    prefill.add(request)
    tokens: list[int] = []
    while prefill.has_work or decode.has_work:
        for engine in (prefill, decode):
            result = engine.step()
            tokens += [token for output in result.tokens for token in output.token_ids]
            for handoff in result.handoffs:
                decode.adopt(handoff)
    assert tokens == list(finish(small_engine(tiny_model), [request])["r"])


def test_c11_a_block_that_is_evicted_before_the_send_reads_it_is_sent_whole(
    tiny_model: Path, cpu_library: Path
) -> None:
    """A hand-off is a copy: whatever the prefill worker does with its blocks then changes no token."""
    prefill = small_engine(tiny_model, role="prefill")
    prefill.pool.allocate(prefill.pool.num_available - 12)
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    shared = Request("shared", tuple(byte_ids(b"the same beginning, and an end")), sampling)
    prefill.add(shared)
    (handoff,) = prefill.step().handoffs
    for number in range(6):  # each takes all blocks that there are
        other = Request(f"o{number}", tuple(byte_ids(bytes([65 + number]) * 180)), sampling)
        prefill.add(other)
        while prefill.has_work:
            prefill.step()
    assert prefill.statistics().pool.evictions > 0
    decode = small_engine(tiny_model, role="decode")
    decode.adopt(handoff)
    tokens: list[int] = list(handoff.header.generated_ids)
    while decode.has_work:
        tokens += [token for output in decode.step().tokens for token in output.token_ids]
    assert tokens == list(finish(small_engine(tiny_model), [shared])["shared"])


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/inference/v1/generate", "/generate"])
def test_c13_an_endpoint_that_is_not_there_runs_nothing(make: Make, path: str) -> None:
    with make(disaggregated=True) as stack:
        answer = httpx.post(f"{stack.url}{path}", json={"model": "tiny", "prompt": "a", "input": "a"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
        assert all(worker.call(worker.engine.statistics).steps == 0 for worker in stack.workers)


# ---------------------------------------------------------------- streaming, cancel, HTTP
def test_c20_disconnects_right_behind_the_request_lose_no_place(make: Make) -> None:
    """A body and a hang-up at once, many times: nothing of any stays, and the next one is served."""
    body = json.dumps({**LONG, "stream": False}).encode()
    with make(disaggregated=True, max_sequences=2, max_waiting=512) as stack:
        where = httpx.URL(stack.url)
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        )
        for _ in range(200):
            with socket.create_connection((where.host, where.port)) as connection:
                connection.sendall(head + body)
        stack.wait_until_idle()
        short = {**LONG, "dockyard": {"forced_text": "xyz"}}
        answer = httpx.post(f"{stack.url}/v1/chat/completions", json=short, timeout=PATIENCE_S)
        assert answer.json()["choices"][0]["message"]["content"] == "xyz"
        for worker in stack.workers:
            worker.call(worker.check_integrity)


@pytest.mark.parametrize("disaggregated", [False, True])
def test_c21_the_first_token_takes_no_step_more_than_the_bare_engine(make: Make, disaggregated: bool) -> None:
    """One client: a step for the prompt and its first token, one for each further, and a chunk each."""
    body = {**LONG, "stream": True, "dockyard": {"forced_text": "vwxyz"}, "max_tokens": 5}
    with make(disaggregated=disaggregated) as stack:
        chunks = list(stack.sdk().chat.completions.create(**split(body)))
        said = [c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content]
        steps = [worker.call(worker.engine.statistics).steps for worker in stack.workers]
    assert said == list("vwxyz")
    assert steps == ([1, 4] if disaggregated else [5])


def test_c21_the_first_token_comes_while_decode_cannot_go_on(make: Make) -> None:
    """It waits for no second one, nor for the hand-off: decode is held until the client has it."""
    has_it = threading.Event()
    with make(disaggregated=True) as stack:
        _, decode = stack.workers
        held = threading.Thread(target=lambda: decode.call(lambda: has_it.wait(PATIENCE_S)))
        held.start()
        try:
            body = {**LONG, "stream": True, "dockyard": {"forced_text": "vwxyz"}, "max_tokens": 5}
            said = ""
            for chunk in stack.sdk().chat.completions.create(**split(body)):
                said += (chunk.choices and chunk.choices[0].delta.content) or ""
                if said:
                    assert has_it.is_set() or said == "v"
                    has_it.set()
        finally:
            has_it.set()
            held.join()
    assert said == "vwxyz"


def split(body: dict[str, Any]) -> dict[str, Any]:
    """As the SDK takes it, with what is ours apart."""
    return {
        **{k: v for k, v in body.items() if k != "dockyard"},
        "extra_body": {"dockyard": body["dockyard"]},
    }


def test_c23_a_natural_stop_is_told_in_a_stream_and_usage_comes_last(make: Make) -> None:
    body = {**LONG, "dockyard": {"forced_text": "the end"}, "stream": True}
    body["stream_options"] = {"include_usage": True}
    with make() as stack:
        answer = httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
        *events, done = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert done == "[DONE]"
        told = [json.loads(event) for event in events]
        assert told[-1]["choices"] == []
        assert told[-1]["usage"]["completion_tokens"] > 0
        assert told[-2]["choices"][0]["finish_reason"] == "stop"
        assert not any(event.get("usage") for event in told[:-1])


# ---------------------------------------------------------------- structure, tools, reasoning
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"enum": ["/tmp/a b", "/etc"]},
        "inner": {"type": "object", "properties": {"depth": {"enum": [1, 2]}}, "required": ["depth"],
                  "additionalProperties": False},
    },
    "required": ["path", "inner"],
    "additionalProperties": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory, cpu_library: Path) -> Iterator[Stack]:
    with serving(
        model_path("nano"), tmp_path_factory.mktemp("nano"), disaggregated=True, max_sequences=32,
        profile="fast",
    ) as running:  # fmt: skip
        yield running
        running.wait_until_idle()


def thinking(**fields: Any) -> dict[str, Any]:
    """Of nano, which was never trained to stop thinking: a bias leads it to the end, and past white space."""
    tokenizer = load_tokenizer(model_path("nano"))
    (thought,) = tokenizer.encode(THOUGHT)
    blank = [index for index, data in enumerate(tokenizer.token_bytes()) if data and not data.strip()]
    return {
        "model": "nano", "messages": SAID, "temperature": 1.0, "max_tokens": 400,
        "logit_bias": {str(thought): 20, **dict.fromkeys(map(str, blank), -100)}, **fields,
    }  # fmt: skip


def test_c24_a_schema_behind_thinking_holds_for_32_clients_at_once(nano: Stack) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}

    def ask(seed: int) -> tuple[str, str]:
        with nano.sdk() as sdk:
            (choice,) = sdk.chat.completions.create(**thinking(seed=seed, response_format=form)).choices
        return choice.message.content or "", choice.finish_reason

    with ThreadPoolExecutor(32) as pool:
        replies = list(pool.map(ask, range(32)))
    for text, reason in replies:
        assert reason == "stop"
        assert json.loads(text).keys() == {"path", "inner"}
        assert "{{" not in text.replace(" ", "")


def test_c26_ten_turns_of_tools_give_their_reasoning_and_take_it_back(nano: Stack) -> None:
    """The model's turns are given, so that each reasons and calls."""
    tools = [{"type": "function", "function": {"name": "find", "parameters": SCHEMA}}]
    messages: list[Any] = [{"role": "user", "content": "Find it."}]
    with nano.sdk() as sdk:
        for turn in range(10):
            thought, wanted = f"Turn {turn}: look there.", {"path": "/etc", "inner": {"depth": turn}}
            written = f"{thought}{THOUGHT}\n\n{render_calls((ToolCall('find', wanted),), V41)}"
            (choice,) = sdk.chat.completions.create(
                model="nano", messages=messages, tools=tools,
                extra_body={"dockyard": {"forced_text": written}},
            ).choices  # fmt: skip
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
            reasoning = choice.message.model_extra["reasoning_content"]
            assert reasoning == thought
            (call,) = choice.message.tool_calls
            assert json.loads(call.function.arguments) == wanted
            messages += [said(call, reasoning), result(call)]
        silent = [{**m, "reasoning_content": ""} if m["role"] == "assistant" else m for m in messages]
        told, without = (prompt_tokens(sdk, sent, tools) for sent in (messages, silent))
        assert told >= without + 10 * 5, "reasoning that came back was dropped"


def said(call: Any, reasoning: str) -> dict[str, Any]:
    """The turn as agents send it back."""
    return {
        "role": "assistant", "content": None, "reasoning_content": reasoning,
        "tool_calls": [call.model_dump()],
    }  # fmt: skip


def result(call: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call.id, "content": "nothing there"}


def prompt_tokens(sdk: openai.OpenAI, messages: list[Any], tools: list[Any]) -> int:
    asked: Any = {"model": "nano", "messages": messages, "tools": tools, "max_tokens": 1}
    usage = sdk.chat.completions.create(**asked).usage
    assert usage is not None
    return usage.prompt_tokens
