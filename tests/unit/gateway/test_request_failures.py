"""Each answer with an error is counted by its code, whatever refused the request."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from actors.token_client import RequestFailed
from engine.chat.tokenizer import ChatTokenizer
from gateway.app import create_app
from gateway.config import GatewayConfig
from gateway.service import ChatService
from protocol.wire import Failed

CHAT = "/v1/chat/completions"


async def no_status() -> dict[str, Any]:
    return {}


async def no_counts() -> Sequence[Any]:
    return ()


async def no_pace(role: str, factor: float) -> None: ...


async def never_whole() -> AsyncIterator[bytes]:
    yield b"{"
    await asyncio.Event().wait()


def failures(page: str) -> dict[str, float]:
    lines = (line for line in page.splitlines() if line.startswith("dockyard:request_failures_total{"))
    return {line.split('code="')[1].split('"')[0]: float(line.rpartition(" ")[2]) for line in lines}


async def asked(
    tokenizer: ChatTokenizer, path: str, content: Any, *, ending: bool = False, fault: Exception | None = None
) -> tuple[int, dict[str, float]]:
    """The answer's status, and what `/metrics` has counted by then."""

    async def complete(generations: object) -> list[Any]:
        assert fault is not None, "it is refused before"
        raise fault

    model = SimpleNamespace(
        name="tiny", form=None, no_chat="no template", tokenizer=tokenizer, opening=(), max_positions=64
    )
    service = SimpleNamespace(
        model=model, config=GatewayConfig(body_timeout_s=0.05), ending=asyncio.Event(), complete=complete,
        client=SimpleNamespace(lost="", num_running=0, num_waiting=0),
    )  # fmt: skip
    if ending:
        service.ending.set()
    app = create_app(cast(ChatService, service), no_status, no_counts, no_pace)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        reply = await http.post(path, content=content)
        return reply.status_code, failures((await http.get("/metrics")).text)


@pytest.mark.parametrize(
    ("path", "content", "options", "answer"),
    [
        (CHAT, b"no JSON", {}, (400, "invalid")),
        (CHAT, b'{"messages": [{"role": "user", "content": "a"}]}', {}, (400, "invalid")),
        ("/v1/completions", b'{"prompt": "a", "max_tokens": -1}', {}, (400, "invalid")),
        ("/v1/completions", b'{"prompt": "%s"}' % (b"a " * 200), {}, (400, "context_length_exceeded")),
        (CHAT, None, {}, (408, "late")),
        (CHAT, None, {"ending": True}, (503, "lost")),
        ("/v1/completions", b'{"prompt": "a"}', {"fault": RuntimeError("ours")}, (500, "internal")),
        (
            "/v1/completions", b'{"prompt": "a"}',
            {"fault": RequestFailed(Failed("r", "overloaded", "too many"))}, (429, "overloaded"),
        ),
    ],
)  # fmt: skip
def test_an_answer_with_an_error_is_counted_once(
    tiny_tokenizer: ChatTokenizer, path: str, content: Any, options: dict[str, Any], answer: tuple[int, str]
):
    body = never_whole() if content is None else content
    assert asyncio.run(asked(tiny_tokenizer, path, body, **options)) == (answer[0], {answer[1]: 1.0})


def test_what_is_no_request_for_text_is_not(tiny_tokenizer: ChatTokenizer):
    assert asyncio.run(asked(tiny_tokenizer, "/v1/nothing", b"{}")) == (404, {})
