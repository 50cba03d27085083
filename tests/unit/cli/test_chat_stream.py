"""The client's side of a streamed chat completion, whatever the endpoint sends."""

from collections.abc import Iterator
from typing import cast

import pytest

from cli.chat import _reply
from cli.chat_stream import ChatFailed, ChatStream, Piece, _pieces, _refused

CHUNK = 'data: {"choices":[{"index":0,"delta":{"content":"%s"}}]}'


def test_texts_come_until_the_end_mark() -> None:
    head = 'data: {"choices":[{"index":0,"delta":{"role":"assistant"}}]}'
    lines = [": a comment", head, "", CHUNK % "a", "", CHUNK % "b", 'data: {"choices":[]}', "data: [DONE]"]
    assert list(_pieces(iter(lines))) == [Piece("a"), Piece("b")]


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
    pieces = _pieces(iter([CHUNK % "a", last]))
    assert next(pieces) == Piece("a")
    with pytest.raises(ChatFailed, match=says):
        next(pieces)


def test_thoughts_are_told_from_what_is_said() -> None:
    thought = 'data: {"choices":[{"index":0,"delta":{"reasoning_content":"so"}}]}'
    assert list(_pieces(iter([thought, CHUNK % "a", "data: [DONE]"]))) == [Piece("so", True), Piece("a")]


def test_a_reply_of_thoughts_alone_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    class Thinking:
        def reply(self, messages: object) -> Iterator[Piece]:
            yield Piece("so, what", is_thought=True)

    assert _reply(cast(ChatStream, Thinking()), [], quiet=False) == ""
    said = capsys.readouterr()
    assert said.out == "\n"
    assert "so, what" in said.err
    assert "thought to the end" in said.err
    assert _reply(cast(ChatStream, Thinking()), [], quiet=True) == ""
    assert "thought to the end" in capsys.readouterr().err


def test_nobody_there_is_told_with_the_address() -> None:
    with ChatStream("http://127.0.0.1:9", {}) as stream, pytest.raises(ChatFailed, match="refused: http"):
        next(stream.reply([]))


@pytest.mark.parametrize(
    ("status", "points_to_status"), [(400, False), (429, False), (404, True), (503, True)]
)
def test_what_runs_is_pointed_to_where_that_is_the_matter(status: int, points_to_status: bool) -> None:
    refused = _refused(status, b'{"error": {"message": "reasoning_effort is 500, expected 1 to 100"}}')
    assert refused.message == f"HTTP {status}: reasoning_effort is 500, expected 1 to 100"
    assert ("dockyard status" in refused.hint) is points_to_status
