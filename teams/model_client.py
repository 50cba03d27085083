"""How an agent asks a model: one call, one completion, and where its time went.

The gateway says where the time went in an extra field of its reply; any other endpoint of the same dialect
works too, and then the whole call counts as decoding, marked as measured by the client.
"""

import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import httpx
import openai
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protocol.clock import Clock, SystemClock
from protocol.errors import DockyardError, InvalidInput

ModelPhase = Literal["model.queue", "model.prefill", "model.transfer", "model.decode"]
Role = Literal["system", "user", "assistant"]

# Two processes of one host read the same clock; a span further outside the call than this is another host's.
_CLOCK_TOLERANCE_NS = 5_000_000


class ModelError(DockyardError):
    """The endpoint refused, failed or could not be reached. Nothing was retried."""


class ModelRefusedError(ModelError, InvalidInput):
    """The endpoint says that the request itself is wrong: asked again, it would refuse again."""


# Of the 4xx, those that speak of the moment and not of the request: timeout, conflict, too early, too many.
_PASSING = frozenset({408, 409, 425, 429})


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Phase:
    """One stretch of a model call, in nanoseconds of this host's monotonic clock."""

    kind: ModelPhase
    start_ns: int
    end_ns: int
    measured: Literal["gateway", "client"]


@dataclass(frozen=True, slots=True)
class Completion:
    """A model's answer. At least one phase, in time order; token counts are the endpoint's."""

    text: str
    timeline: tuple[Phase, ...]
    prompt_tokens: int
    completion_tokens: int
    request_id: str = ""


class ModelClient(Protocol):
    """One agent's line to a model. Waits for the whole answer; cancelling a call ends the request."""

    async def complete(
        self,
        messages: Sequence[ChatMessage],
        *,
        max_tokens: int,
        temperature: float,
        seed: int | None,
        forced: str | None = None,
    ) -> Completion:
        """Raises `ModelError`, and `ModelRefusedError` where the request is at fault.

        With `forced`, the engine computes these very tokens instead of choosing.
        """
        ...

    async def close(self) -> None:
        """Frees the connection. May be called again."""
        ...


class _Span(BaseModel):
    # The gateway may be newer than this client: keys it adds are no reason to fail.
    model_config = ConfigDict(extra="ignore", frozen=True)
    kind: ModelPhase
    start_ns: int = Field(ge=0)
    end_ns: int = Field(ge=0)


class _Ledger(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)
    timeline: tuple[_Span, ...] = ()
    request_id: str = ""


class HttpModelClient:
    """`ModelClient` over chat completions. The API key travels with each request.

    `base_url` ends in `/v1`. `timeout_s` bounds one call. Close it, or use it as an async context manager.
    `tls`: how to trust an https endpoint; making one reads all certificates of the host, so share it.
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
        self._model = model
        self._clock = clock or SystemClock()
        self._client = openai.AsyncOpenAI(
            base_url=base_url,
            api_key=api_key,
            timeout=timeout_s,
            max_retries=0,
            http_client=None if tls is None else openai.DefaultAsyncHttpxClient(verify=tls),
        )

    async def __aenter__(self) -> "HttpModelClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._client.close()

    async def complete(
        self,
        messages: Sequence[ChatMessage],
        *,
        max_tokens: int,
        temperature: float,
        seed: int | None,
        forced: str | None = None,
    ) -> Completion:
        start_ns = self._clock.now_ns()
        try:
            reply = await self._client.chat.completions.create(
                model=self._model,
                messages=[_as_param(message) for message in messages],
                max_tokens=max_tokens,
                temperature=temperature,
                seed=seed if seed is not None else openai.omit,
                extra_body=None if forced is None else {"dockyard": {"forced_text": forced}},
            )
        except openai.OpenAIError as error:
            kind = ModelRefusedError if _is_refusal(error) else ModelError
            raise kind(f"{self._model} at {self._client.base_url}: {error}") from error
        return completion_of(reply, start_ns, self._clock.now_ns())


def _is_refusal(error: openai.OpenAIError) -> bool:
    return (
        isinstance(error, openai.APIStatusError)
        and 400 <= error.status_code < 500
        and error.status_code not in _PASSING
    )


def completion_of(reply: ChatCompletion, start_ns: int, end_ns: int) -> Completion:
    """Reads a chat completion that was asked for at `start_ns` and had arrived by `end_ns`.

    Raises `ModelError` for a reply without a choice.
    """
    if not reply.choices:
        raise ModelError("the endpoint's reply holds no choice")
    extra = cast(Mapping[str, Any], reply.model_extra or {})
    timeline, request_id = _timeline(extra.get("dockyard"), start_ns, end_ns)
    usage = reply.usage
    return Completion(
        text=reply.choices[0].message.content or "",
        timeline=timeline,
        prompt_tokens=usage.prompt_tokens if usage else 0,
        completion_tokens=usage.completion_tokens if usage else 0,
        request_id=request_id or reply.id,
    )


def _timeline(ledger: object, start_ns: int, end_ns: int) -> tuple[tuple[Phase, ...], str]:
    whole = (Phase("model.decode", start_ns, end_ns, "client"),)
    if ledger is None:
        return whole, ""
    try:
        parsed = _Ledger.model_validate(ledger)
    except ValidationError as error:
        raise ModelError(f"the reply's `dockyard` field does not fit: {error.errors()[0]['msg']}") from error
    spans = sorted(parsed.timeline, key=lambda span: (span.start_ns, span.end_ns))
    same_clock = all(
        start_ns - _CLOCK_TOLERANCE_NS <= span.start_ns <= span.end_ns <= end_ns + _CLOCK_TOLERANCE_NS
        for span in spans
    )
    if not spans or not same_clock:
        return whole, parsed.request_id

    def inside(at_ns: int) -> int:
        return min(max(at_ns, start_ns), end_ns)

    return (
        tuple(Phase(span.kind, inside(span.start_ns), inside(span.end_ns), "gateway") for span in spans),
        parsed.request_id,
    )


def _as_param(message: ChatMessage) -> ChatCompletionMessageParam:
    return cast(ChatCompletionMessageParam, {"role": message.role, "content": message.content})


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
