"""The client's side of a streamed chat completion. Source: OpenAI API reference, chat completion chunks."""

from collections.abc import Iterator, Sequence
from typing import Any, Self

import httpx
import msgspec

from protocol.errors import DockyardError
from teams.model_reply import connect_failure, failure_text

_NOT_FOUND, _SERVER_ERROR = 404, 500
_SILENCE_S = 600.0  # between two pieces of a reply: a long prompt on a busy machine


class ChatFailed(DockyardError):
    """The endpoint answered with an error, or not at all."""


class Piece(msgspec.Struct, frozen=True):
    """Of a reply: what is said, or what the model thinks before it says it."""

    text: str
    is_thought: bool = False


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta


class _Error(msgspec.Struct):
    message: str


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: _Error | None = None


class ChatStream:
    """An endpoint (without `/v1`) and what every request to it says. A context manager, for one thread."""

    def __init__(self, endpoint: str, settings: dict[str, Any]) -> None:
        self._url = f"{endpoint}/v1/chat/completions"
        self._settings = settings
        self._client = httpx.Client(
            headers={"authorization": "Bearer dk-chat"}, timeout=httpx.Timeout(10.0, read=_SILENCE_S)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def reply(self, messages: Sequence[dict[str, str]]) -> Iterator[Piece]:
        """Pieces of the reply as they come. Raises ChatFailed."""
        body = msgspec.json.encode({**self._settings, "messages": messages, "stream": True})
        try:
            with self._client.stream(
                "POST", self._url, content=body, headers={"content-type": "application/json"}
            ) as response:
                if response.status_code != 200:
                    raise _refused(response.status_code, response.read())
                yield from _pieces(response.iter_lines())
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _failed(connect_failure(error, self._url)) from error


def _pieces(lines: Iterator[str]) -> Iterator[Piece]:
    for line in lines:
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:"):
            continue
        if data == "[DONE]":
            return
        try:
            chunk = msgspec.json.decode(data, type=_Chunk)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise _failed(f"the reply is no chat completion chunk: {error}") from error
        if chunk.error is not None:
            raise _failed(chunk.error.message)
        for delta in (choice.delta for choice in chunk.choices):
            if delta.reasoning_content:
                yield Piece(delta.reasoning_content, is_thought=True)
            if delta.content:
                yield Piece(delta.content)
    raise _failed("the reply ended before its end")


def _refused(status: int, body: bytes) -> ChatFailed:
    """What runs matters where the model is not there or the server fails; else the request is what to mend,
    and the reply says how."""
    text = failure_text(status, body)
    return _failed(text) if status == _NOT_FOUND or status >= _SERVER_ERROR else ChatFailed(text)


def _failed(message: str) -> ChatFailed:
    return ChatFailed(message, hint="dockyard status shows what is running")
