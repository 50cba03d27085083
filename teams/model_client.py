"""How an agent asks a model: chat completions over HTTP, one request a call.

The gateway says where the time went in an extra field of its reply; any other endpoint of the same dialect
works too, and then the whole call counts as decoding, marked as measured by the client. No endpoint is
trusted: a call has a deadline, a reply has a size, and what does not fit is a `ModelError`.
"""

import asyncio
import ssl
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import msgspec

from protocol.clock import Clock, SystemClock
from protocol.errors import InvalidInput
from teams.model_call import ChatMessage, Completion, ModelClient, ModelPhase, Phase, Role
from teams.model_reply import (
    MAX_REPLY_BYTES,
    ModelError,
    ModelRefusedError,
    completion_of,
    connect_failure,
    failure_text,
)

__all__ = [
    "ChatMessage",
    "Completion",
    "HttpModelClient",
    "ModelClient",
    "ModelError",
    "ModelPhase",
    "ModelRefusedError",
    "Phase",
    "Role",
    "completion_of",
    "http_models",
]

# Of the 4xx, those that speak of the moment and not of the request: timeout, conflict, too early, too many.
_PASSING = frozenset({408, 409, 425, 429})


class HttpModelClient:
    """`ModelClient` over chat completions. The API key travels with each request.

    `base_url` ends in `/v1`. `timeout_s` bounds one call from its first byte to its last. Close it, or use it
    as an async context manager. `tls`: how to trust an https endpoint; making one reads all certificates of
    the host, so share it. Raises `InvalidInput` for a key that no header takes.
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str,
        api_key: str,
        timeout_s: float = 600.0,
        clock: Clock | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        if not (api_key.isascii() and api_key.isprintable()):
            raise InvalidInput("the API key holds characters that no header takes", hint="check --api-key")
        self._model = model
        self._clock = clock or SystemClock()
        self._timeout_s = timeout_s
        self._url = f"{base_url.rstrip('/')}/chat/completions"
        self._client = httpx.AsyncClient(
            headers={"authorization": f"Bearer {api_key}", "content-type": "application/json"},
            timeout=timeout_s,
            follow_redirects=True,
            verify=True if tls is None else tls,
        )

    async def __aenter__(self) -> "HttpModelClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._client.aclose()

    async def complete(
        self,
        messages: Sequence[ChatMessage],
        *,
        max_tokens: int,
        temperature: float,
        seed: int | None,
        forced: str | None = None,
    ) -> Completion:
        request: dict[str, Any] = {
            "model": self._model,
            "messages": [{"role": message.role, "content": message.content} for message in messages],
            "max_tokens": max_tokens,
            "temperature": temperature,
        }
        if seed is not None:
            request["seed"] = seed
        if forced is not None:
            request["dockyard"] = {"forced_text": forced}
        start_ns = self._clock.now_ns()
        status, body = await self._post(msgspec.json.encode(request))
        if status >= 300:
            raise self._failure(failure_text(status, body), refused=_is_refusal(status))
        try:
            return completion_of(body, start_ns, self._clock.now_ns())
        except ModelError as error:
            raise self._failure(error.message) from error

    async def _post(self, request: bytes) -> tuple[int, bytes]:
        """Status and whole body. The deadline is ours: the library's starts anew with each byte."""
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._client.stream("POST", self._url, content=request) as response,
            ):
                return response.status_code, await self._body(response)
        except TimeoutError as error:
            raise self._failure(f"no whole answer within {self._timeout_s:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._failure(connect_failure(error, self._url)) from error

    async def _body(self, response: httpx.Response) -> bytes:
        body = bytearray()
        async for part in response.aiter_bytes():
            body += part
            if len(body) > MAX_REPLY_BYTES:
                raise self._failure(f"the reply is longer than {MAX_REPLY_BYTES} bytes: {self._url}")
        return bytes(body)

    def _failure(self, said: str, *, refused: bool = False) -> ModelError:
        kind = ModelRefusedError if refused else ModelError
        return kind(f"model {self._model}: {said if self._url in said else f'{said}: {self._url}'}")


def _is_refusal(status: int) -> bool:
    return 400 <= status < 500 and status not in _PASSING


def http_models(
    base_url: str, *, model: str, run_id: str, api_key: str | None = None, timeout_s: float = 600.0
) -> Callable[[str], ModelClient]:
    """Clients for the agents of one team run.

    Without an `api_key` each agent has its own, `dk-RUN.AGENT`, which travels with every request; the gateway
    does not read it yet. A foreign endpoint gets the key that its owner gave.
    """

    # Here, before the run: made for each agent, it would stop the whole team for 30 ms and more a spawn.
    tls = httpx.create_ssl_context()

    def client(agent: str) -> ModelClient:
        return HttpModelClient(
            base_url, model=model, api_key=api_key or f"dk-{run_id}.{agent}", timeout_s=timeout_s, tls=tls
        )

    return client
