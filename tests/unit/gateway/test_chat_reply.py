"""Replies: stages without gaps, sums that add up, and chunks in the shape of the API."""

import json

from hypothesis import given
from hypothesis import strategies as st

from gateway.chat_reply import (
    ChoiceResult,
    ReplyHead,
    chunk,
    failure_chunk,
    timeline,
    usage,
    usage_chunk,
    whole,
)
from protocol.wire import Tokens

HEAD = ReplyHead("chatcmpl-1", 17, "m")


def last(*times: int, cached: int = 0, request_id: str = "r") -> Tokens:
    arrived, scheduled, prefilled, adopted, produced = times
    return Tokens(request_id, 0, (1,), "stop", arrived, scheduled, prefilled, adopted, produced, cached)


def result(index: int, count: int, produced: int = 9, cached: int = 0) -> ChoiceResult:
    return ChoiceResult(index, "text", "stop", count, last(1, 2, 3, 4, produced, cached=cached))


def payload(event: bytes) -> dict[str, object]:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    return json.loads(event[6:])


@given(steps=st.lists(st.integers(0, 5), min_size=5, max_size=5), adopted=st.booleans())
def test_stages_follow_each_other_and_sum_to_the_whole(steps: list[int], adopted: bool) -> None:
    times = [100 + sum(steps[: n + 1]) for n in range(5)]
    if not adopted:
        times[3] = 0
    stages = timeline(last(*times))
    assert all(stage["end_ns"] > stage["start_ns"] for stage in stages)
    assert sum(stage["end_ns"] - stage["start_ns"] for stage in stages) == times[4] - times[0]
    assert [a["end_ns"] for a in stages[:-1]] == [b["start_ns"] for b in stages[1:]]
    assert adopted or "model.transfer" not in [stage["kind"] for stage in stages]


def test_usage_adds_up_over_choices() -> None:
    counts = usage(10, [result(0, 3, cached=4), result(1, 5, cached=8)])
    assert counts == {
        "prompt_tokens": 10, "completion_tokens": 8, "total_tokens": 18,
        "prompt_tokens_details": {"cached_tokens": 8},
    }  # fmt: skip


def test_usage_adds_up_the_cached_tokens_of_several_prompts() -> None:
    first = [result(0, 3, cached=4), result(1, 5, cached=8)]
    second = ChoiceResult(2, "text", "stop", 1, last(1, 2, 3, 4, 5, cached=7, request_id="s"))
    assert usage(20, [*first, second])["prompt_tokens_details"] == {"cached_tokens": 15}
    assert usage(20, [])["prompt_tokens_details"] == {"cached_tokens": 0}


def test_the_timeline_is_that_of_the_slowest_choice() -> None:
    answer = json.loads(whole(HEAD, 10, [result(0, 3, produced=50), result(1, 3, produced=20)]))
    assert answer["dockyard"]["timeline"][-1]["end_ns"] == 50
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]


def test_events_are_server_sent_events() -> None:
    event = payload(chunk(HEAD, 1, {"content": "a\nb"}))
    assert event["object"] == "chat.completion.chunk"
    assert event["choices"] == [
        {"index": 1, "delta": {"content": "a\nb"}, "finish_reason": None, "logprobs": None}
    ]
    assert payload(usage_chunk(HEAD, 10, [result(0, 3)]))["choices"] == []
    assert payload(failure_chunk({"message": "m"})) == {"error": {"message": "m"}}
