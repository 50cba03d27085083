"""The client's side of a streamed chat completion, whatever the endpoint sends."""

import pytest

from cli.chat_stream import ChatFailed, ChatStream, _texts

CHUNK = 'data: {"choices":[{"index":0,"delta":{"content":"%s"}}]}'


def test_texts_come_until_the_end_mark() -> None:
    head = 'data: {"choices":[{"index":0,"delta":{"role":"assistant"}}]}'
    lines = [": a comment", head, "", CHUNK % "a", "", CHUNK % "b", 'data: {"choices":[]}', "data: [DONE]"]
    assert list(_texts(iter(lines))) == ["a", "b"]


@pytest.mark.parametrize(
    ("last", "says"),
    [
        ('data: {"error":{"message":"the decode worker is lost"}}', "decode worker is lost"),
        ("data: <html>", "no chat completion chunk"),
        ('data: {"choices":[5]}', "no chat completion chunk"),
        ("data: " + "[" * 100_000, "no chat completion chunk"),
        ("", "ended before its end"),
    ],
)
def test_an_end_that_is_none_is_an_error_after_what_has_come(last: str, says: str) -> None:
    texts = _texts(iter([CHUNK % "a", last]))
    assert next(texts) == "a"
    with pytest.raises(ChatFailed, match=says):
        next(texts)


def test_nobody_there_is_told_with_the_address() -> None:
    with ChatStream("http://127.0.0.1:9", {}) as stream, pytest.raises(ChatFailed, match="refused: http"):
        next(stream.reply([]))
