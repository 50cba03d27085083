"""A stream that one server has begun goes on at another one as if nothing had happened."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from stack import PATIENCE_S, Stack, serving

CHAT: dict[str, Any] = {
    "model": "tiny", "messages": [{"role": "user", "content": "hello the world"}], "max_tokens": 20,
    "temperature": 1.0, "seed": 4, "ignore_eos": True,
}  # fmt: skip
TEXT: dict[str, Any] = {**CHAT, "prompt": "hello the world", "logprobs": 1}
TEXT.pop("messages")
ROUTES = {"chat/completions": CHAT, "completions": TEXT}


@dataclass(slots=True)
class Told:
    """What the events of one choice amount to, and after each of them how far it had got."""

    text: str = ""
    ids: list[int] = field(default_factory=list[int])
    offsets: list[int] = field(default_factory=list[int])
    prompt: list[int] | None = None
    reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict[str, Any])
    so_far: list[tuple[str, list[int]]] = field(default_factory=list[tuple[str, list[int]]])

    def take(self, event: dict[str, Any]) -> None:
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            delta = choice.get("delta", choice)
            self.text += delta.get("content") or delta.get("text") or ""
            self.ids += choice.get("token_ids", [])
            self.prompt = event.get("prompt_token_ids") or choice.get("prompt_token_ids") or self.prompt
            self.reason = choice["finish_reason"] or self.reason
            self.offsets += (choice.get("logprobs") or {}).get("text_offset", [])
        self.so_far.append((self.text, list(self.ids)))


def events(stack: Stack, route: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    asked = {**body, "stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{stack.url}/v1/{route}", json=asked, timeout=PATIENCE_S) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def streamed(stack: Stack, route: str, body: dict[str, Any]) -> Told:
    told = Told()
    for event in events(stack, route, body):
        told.take(event)
    return told


def begun(body: dict[str, Any], ids: list[int]) -> dict[str, Any]:
    return {**body, "dockyard": {**body.get("dockyard", {}), "generated_ids": ids}}


@pytest.fixture(scope="module", params=[False, True], ids=["one worker", "prefill and decode"])
def pair(
    request: pytest.FixtureRequest,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    cpu_library: Path,
) -> Iterator[tuple[Stack, Stack]]:
    """Two servers of the same weights."""
    one, other = tmp_path_factory.mktemp("a"), tmp_path_factory.mktemp("b")
    with (
        serving(tiny_model, one, disaggregated=request.param) as first,
        serving(tiny_model, other, disaggregated=request.param) as second,
    ):
        yield first, second
        first.wait_until_idle()
        second.wait_until_idle()


@pytest.mark.parametrize("route", ROUTES)
def test_a_stream_goes_on_wherever_it_was_cut(pair: tuple[Stack, Stack], route: str) -> None:
    first, second = pair
    whole = streamed(first, route, ROUTES[route])
    assert len(whole.ids) == whole.usage["completion_tokens"] == 20
    assert whole.prompt is not None
    assert len(whole.prompt) == whole.usage["prompt_tokens"]
    cuts = {len(ids): (text, ids) for text, ids in whole.so_far if 0 < len(ids) < 20}
    assert cuts.keys() == set(range(1, 20))
    for count, (text, ids) in cuts.items():
        rest = streamed(second, route, begun(ROUTES[route], ids))
        assert text + rest.text == whole.text, f"cut behind {count} tokens"
        assert (ids + rest.ids, rest.reason, rest.prompt) == (whole.ids, whole.reason, whole.prompt)
        assert rest.usage["completion_tokens"] == 20 - count
        assert whole.offsets[:count] + rest.offsets == whole.offsets


@pytest.mark.parametrize(
    ("text", "stop"), [("é 😀 漢字 é", None), ("go on and STOP here", ["STOP"]), ("a b c", ["c", "zz"])]
)
def test_characters_and_stop_strings_that_lie_across_the_cut_are_whole(
    pair: tuple[Stack, Stack], text: str, stop: list[str] | None
) -> None:
    first, second = pair
    body = {**CHAT, "stop": stop, "dockyard": {"forced_text": text}}
    whole = streamed(first, "chat/completions", body)
    expected = text.partition(stop[0])[0] if stop else text
    assert (whole.text, whole.reason) == (expected, "stop")
    for shown, ids in whole.so_far:
        if 0 < len(ids) < len(whole.ids):
            rest = streamed(second, "chat/completions", begun(body, ids))
            assert (shown + rest.text, rest.reason) == (expected, "stop")


def test_a_whole_reply_has_the_rest_and_its_ids(pair: tuple[Stack, Stack]) -> None:
    whole = streamed(pair[0], "completions", TEXT)
    body = {**begun(TEXT, whole.ids[:7]), "return_token_ids": True}
    (choice,) = httpx.post(f"{pair[1].url}/v1/completions", json=body, timeout=60).json()["choices"]
    assert choice["token_ids"] == whole.ids[7:]
    assert choice["prompt_token_ids"] == whole.prompt
    assert choice["logprobs"]["text_offset"] == whole.offsets[7:]
    chat = httpx.post(
        f"{pair[1].url}/v1/chat/completions", json={**CHAT, "return_token_ids": True, "n": 2}, timeout=60
    ).json()
    assert len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]
    assert [len(choice["token_ids"]) for choice in chat["choices"]] == [20, 20]
    silent = httpx.post(f"{pair[1].url}/v1/chat/completions", json=CHAT, timeout=60).json()
    assert "prompt_token_ids" not in silent
    assert "token_ids" not in silent["choices"][0]


@pytest.mark.parametrize(
    ("changes", "parameter", "words"),
    [
        ({"dockyard": {"generated_ids": [5], "resumed": [16]}}, "dockyard.resumed", "resumed is"),
        ({"dockyard": {"resumed": [16]}}, "dockyard.resumed", "generated_ids is not"),
        ({"dockyard": {"generated_ids": [99_999]}}, "prompt_ids", "outside the vocabulary"),
        ({"dockyard": {"generated_ids": [-1]}}, "dockyard.generated_ids", "generated_ids is -1"),
        ({"dockyard": {"generated_ids": "x"}}, "dockyard.generated_ids", "Expected `array"),
        ({"dockyard": {"generated_ids": [5] * 20}}, "dockyard.generated_ids", "20 tokens of the 20"),
        ({"dockyard": {"generated_ids": [5, 2]}, "ignore_eos": False}, "dockyard.generated_ids", "is an end"),
        ({"dockyard": {"generated_ids": [5]}, "n": 2}, "dockyard.generated_ids", "2 are asked for"),
        ({"dockyard": {"generated_ids": [5]}, "prompt_logprobs": 0}, "prompt_logprobs", "has begun already"),
        ({"dockyard": {"slack_ms": -1}}, "dockyard.slack_ms", "slack_ms is -1"),
        ({"dockyard": {"slack_ms": 1e12}}, "dockyard.slack_ms", "between 0 and 86400000"),
        ({"dockyard": {"slack_ms": "much"}}, "dockyard.slack_ms", "Expected `float"),
    ],
)
@pytest.mark.parametrize("route", ROUTES)
def test_what_cannot_go_on_is_refused_by_name(
    pair: tuple[Stack, Stack], route: str, changes: dict[str, Any], parameter: str, words: str
) -> None:
    body = {**ROUTES[route], **changes}
    answer = httpx.post(f"{pair[0].url}/v1/{route}", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == parameter


def test_fields_of_one_output_or_of_chats_are_refused_elsewhere(pair: tuple[Stack, Stack]) -> None:
    for changes, parameter in (
        ({"prompt": ["a", "b"], "dockyard": {"generated_ids": [5]}}, "dockyard.generated_ids"),
        ({"dockyard": {"forced_text": "a"}}, "dockyard.forced_text"),
    ):
        answer = httpx.post(f"{pair[0].url}/v1/completions", json={**TEXT, **changes}, timeout=60)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, parameter)
