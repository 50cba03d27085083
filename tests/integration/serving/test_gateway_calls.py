"""Calls in DSML over HTTP: arguments come in pieces, and a stream that was cut goes on inside of one."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from stack import PATIENCE_S, Stack, serving
from test_gateway_deepseek import HELLO, TOOLS, write_folder

from engine.chat.dsml import V41, ToolCall, render_calls

WRITTEN = ToolCall("find", {"path": 'ls -la "a b" 2>&1 | grep é && echo 漢字 ' * 3, "depth": 2})
SECOND = ToolCall("find", {"path": "/etc", "depth": 1})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("v41"))


@pytest.fixture(scope="module")
def pair(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, cpu_library: Path
) -> Iterator[tuple[Stack, Stack]]:
    """Two servers of the same weights. Neither keeps windows, so they run again behind a cached prefix."""
    one, other = tmp_path_factory.mktemp("a"), tmp_path_factory.mktemp("b")
    settings: dict[str, Any] = {"caches": "float32", "tiers": {"window_bytes": 0}}
    with (
        serving(folder, one, disaggregated=True, **settings) as first,
        serving(folder, other, **settings) as second,
    ):
        yield first, second
        first.wait_until_idle()
        second.wait_until_idle()


def body(text: str, **more: Any) -> dict[str, Any]:
    return {
        "model": "x", "messages": HELLO, "tools": TOOLS, "reasoning_effort": "none", "return_token_ids": True,
        "dockyard": {"forced_text": text, **more},
    }  # fmt: skip


def lines(stack: Stack, asked: dict[str, Any]) -> Iterator[str]:
    asked = {**asked, "stream": True}
    url = f"{stack.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=asked, timeout=PATIENCE_S) as answer:
        assert answer.status_code == 200, answer.read()
        yield from (line.removeprefix("data: ") for line in answer.iter_lines() if line)


def choices(stack: Stack, asked: dict[str, Any]) -> list[dict[str, Any]]:
    *events, last = lines(stack, asked)
    assert last == "[DONE]"
    return [json.loads(event)["choices"][0] for event in events]


def calls(found: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Names and arguments, put together as clients do."""
    made: list[list[str]] = []
    for choice in found:
        for piece in choice["delta"].get("tool_calls", []):
            if piece.get("id"):
                made.append([piece["function"]["name"], ""])
            made[piece["index"]][1] += piece["function"]["arguments"]
    return [(name, arguments) for name, arguments in made]


def whole(stack: Stack, asked: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{stack.url}/v1/chat/completions", json=asked, timeout=PATIENCE_S)
    return answer.json()["choices"][0]


def test_a_long_argument_comes_in_pieces_that_are_the_whole(pair: tuple[Stack, Stack]) -> None:
    asked = body(render_calls((WRITTEN, SECOND), V41))
    streamed = choices(pair[0], asked)
    expected = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in whole(pair[0], asked)["message"]["tool_calls"]
    ]
    assert calls(streamed) == expected
    assert [json.loads(arguments) for _, arguments in expected] == [WRITTEN.arguments, SECOND.arguments]
    pieces = [choice for choice in streamed if choice["delta"].get("tool_calls")]
    assert len(pieces) > 20
    assert streamed[-1]["finish_reason"] == "tool_calls"


def test_a_stream_that_was_cut_inside_of_a_call_goes_on_elsewhere(pair: tuple[Stack, Stack]) -> None:
    text = render_calls((WRITTEN, SECOND), V41)
    full = choices(pair[0], body(text))
    expected, ids = calls(full), [token for choice in full for token in choice.get("token_ids", [])]
    for count in range(1, len(ids), 11):
        before: list[dict[str, Any]] = []
        told = 0
        for choice in full:
            told += len(choice.get("token_ids", []))
            if told > count:
                break
            before.append(choice)
        after = choices(pair[1], body(text, generated_ids=ids[:count]))
        assert calls([*before, *after]) == expected, f"cut behind {count} tokens"
        assert after[-1]["finish_reason"] == "tool_calls"


def test_a_stream_with_a_broken_call_ends_in_an_error_and_a_whole_reply_has_text(
    pair: tuple[Stack, Stack],
) -> None:
    asked = body(render_calls((WRITTEN,), V41).partition("漢字")[0])
    found = list(lines(pair[0], asked))
    error = json.loads(found[-1])["error"]
    assert (error["code"], error["type"]) == ("broken_call", "server_error")
    assert "ends inside a call" in error["message"]
    assert not any(json.loads(line)["choices"][0]["finish_reason"] for line in found[:-1])
    reply = whole(pair[0], asked)
    assert reply["finish_reason"] == "stop"
    assert 'invoke name="find"' in reply["message"]["content"]
    assert "tool_calls" not in reply["message"]


def test_a_stream_behind_a_cached_prefix_goes_on_along_its_windows(pair: tuple[Stack, Stack]) -> None:
    """`resumed` says where windows were run again: what is computed elsewhere then is the same."""
    ids = [100 + (n * n) % 1000 for n in range(90)]
    asked: dict[str, Any] = {
        "model": "x", "prompt": ids, "max_tokens": 12, "temperature": 1.0, "seed": 5, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip

    def post(stack: Stack, **more: Any) -> dict[str, Any]:
        return httpx.post(f"{stack.url}/v1/completions", json={**asked, **more}, timeout=60).json()

    (cold,) = post(pair[0])["choices"]
    warm = post(pair[0])
    (again,) = warm["choices"]
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert "resumed" not in cold
    assert again["resumed"]
    for count in (1, 5, 11):
        begun = {"generated_ids": again["token_ids"][:count], "resumed": again["resumed"]}
        (rest,) = post(pair[1], dockyard=begun)["choices"]
        assert again["token_ids"][:count] + rest["token_ids"] == again["token_ids"]
