import asyncio
import json
from contextlib import suppress

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import InvalidInput
from teams.model_client import ModelError, Phase, completion_of, http_models


def reply(**extra):
    return json.dumps(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 0,
            "model": "m",
            "choices": [
                {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hi"}}
            ],
            "usage": {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9},
            **extra,
        }
    ).encode()


def span(kind, start_ns, end_ns):
    return {"kind": kind, "start_ns": start_ns, "end_ns": end_ns}


def test_the_gateways_timeline_is_taken_in_time_order():
    ledger = {
        "request_id": "req-1",
        "timeline": [
            span("model.decode", 60, 90),
            span("model.queue", 20, 30),
            span("model.prefill", 30, 60),
        ],
        "something_new": 1,
    }
    completion = completion_of(reply(dockyard=ledger), 10, 100)
    assert completion.timeline == (
        Phase("model.queue", 20, 30, "gateway"),
        Phase("model.prefill", 30, 60, "gateway"),
        Phase("model.decode", 60, 90, "gateway"),
    )
    assert (completion.text, completion.prompt_tokens, completion.completion_tokens) == ("hi", 7, 2)
    assert completion.request_id == "req-1"


def test_a_foreign_endpoint_counts_as_decoding_measured_by_the_client():
    completion = completion_of(reply(), 10, 100)
    assert completion.timeline == (Phase("model.decode", 10, 100, "client"),)
    assert completion.request_id == "chatcmpl-1"


def test_another_hosts_clock_is_not_mixed_with_ours():
    ledger = {"request_id": "req-1", "timeline": [span("model.decode", 10**15, 10**15 + 5)]}
    assert completion_of(reply(dockyard=ledger), 10, 100).timeline == (
        Phase("model.decode", 10, 100, "client"),
    )


def test_a_span_that_sticks_out_a_little_is_cut():
    ledger = {"request_id": "req-1", "timeline": [span("model.decode", 8, 104)]}
    (phase,) = completion_of(reply(dockyard=ledger), 10, 100).timeline
    assert (phase.start_ns, phase.end_ns) == (10, 100)


@pytest.mark.parametrize(
    "ledger",
    [{"timeline": [span("model.dream", 1, 2)]}, {"timeline": "soon"}, 7, {"timeline": [{"kind": 1}]}],
)
def test_a_ledger_that_does_not_fit_is_an_error(ledger):
    with pytest.raises(ModelError, match=r"no chat completion.*\$\.dockyard"):
        completion_of(reply(dockyard=ledger), 10, 100)


def test_a_reply_without_a_choice_is_an_error():
    with pytest.raises(ModelError, match="no choice"):
        completion_of(reply(choices=[]), 10, 100)


def message(text):
    return b'{"choices":[{"message":{"content":' + text + b"}}]}"


@pytest.mark.parametrize(
    "body",
    [
        b"", b"<html>502</html>", b"null", b"[]", b"5", b'"yes"', b"{}",
        b'{"choices":null}', b'{"choices":{"0":1}}', b'{"choices":[5]}', b'{"choices":[{"message":"hi"}]}',
        message(b"7"), message(b'["hi"]'), message(b'{"text":"hi"}'), message(b'"\xff"'),
        message(b'"hi"')[:-1] + b',"usage":{"prompt_tokens":"7"}}',
        message(b'"hi"')[:-1] + b',"usage":{"prompt_tokens":-1}}',
        message(b'"hi"')[:-1] + b',"usage":{"prompt_tokens":' + b"9" * 10_000 + b"}}",
        message(b'"hi"')[:-1] + b',"usage":[]}',
        message(b'"hi"')[:-1] + b',"id":7}',
        message(b'"hi"')[:-1] + b',"x":' + b"[" * 100_000 + b"}",
    ],
)  # fmt: skip
def test_a_reply_that_is_no_chat_completion_is_an_error_of_the_model(body):
    with pytest.raises(ModelError, match="no chat completion"):
        completion_of(body, 10, 100)


@given(st.binary() | st.text().map(str.encode) | st.recursive(
    st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(
        st.sampled_from(["choices", "message", "content", "usage", "dockyard", "id"]), inner
    )
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_whatever_comes_is_a_completion_or_an_error_of_the_model(body):
    with suppress(ModelError):
        assert isinstance(completion_of(body, 10, 100).text, str)


def test_half_a_surrogate_becomes_a_character_that_every_file_takes():
    completion = completion_of(message(rb'"a\ud800b \ud83d\ude00"'), 10, 100)
    assert completion.text == "a\N{REPLACEMENT CHARACTER}b \N{GRINNING FACE}"
    assert completion.text.encode()


@pytest.mark.parametrize("key", ["ключ", "sk-1\n", "sk\0"])
def test_a_key_that_no_header_takes_is_bad_input(key):
    with pytest.raises(InvalidInput, match="API key"):
        http_models("http://127.0.0.1:9/v1", model="m", run_id="run-1", api_key=key)("lead")


def test_the_agents_of_a_run_share_one_reading_of_the_certificates(monkeypatch):
    made = []
    real = httpx.create_ssl_context
    monkeypatch.setattr(httpx, "create_ssl_context", lambda: made.append(1) or real())
    clients = http_models("http://127.0.0.1:9/v1", model="m", run_id="run-1")
    assert made == [1]

    async def connect():
        for agent in ("lead", "tester"):
            await clients(agent).close()

    asyncio.run(connect())
    assert made == [1]
