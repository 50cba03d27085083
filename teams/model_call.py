"""One call of a model, as an agent sees it: messages in, one completion out, and where its time went."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

ModelPhase = Literal["model.queue", "model.prefill", "model.transfer", "model.decode"]
Role = Literal["system", "user", "assistant"]


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
