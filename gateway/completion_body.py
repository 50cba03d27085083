"""The body of a completion request: text goes on. Source: OpenAI API reference, completions (legacy)."""

from typing import Any

from engine.errors import InvalidRequest
from gateway.sampling_body import SamplingBody, check_done, parse_body


class CompletionBody(SamplingBody, kw_only=True):
    """`prompt`: a text, its token ids, or several of one of these kinds."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    # Not done: see _NEUTRAL.
    suffix: Any = None
    best_of: Any = None
    prompt_embeds: Any = None
    tools: Any = None


_NEUTRAL: dict[str, tuple[object, ...]] = {
    "suffix": ("",),
    "best_of": (1,),
    "prompt_embeds": (),
    "tools": ([],),
    "add_special_tokens": (True,),
}


def parse_completion(body: bytes) -> CompletionBody:
    """Raises InvalidRequest that names the field."""
    return parse_body(body, CompletionBody)


def check_completion(body: CompletionBody) -> None:
    """Refuses what is not done. `best_of` may be `n`: all that are made are then given."""
    neutral = _NEUTRAL if body.n is None else {**_NEUTRAL, "best_of": (1, body.n)}
    check_done(body, neutral)
    if body.dockyard is not None and body.dockyard.forced_text is not None:
        raise InvalidRequest(
            "dockyard.forced_text is of chats alone", parameter="dockyard.forced_text",
            hint="send a conversation to /v1/chat/completions",
        )  # fmt: skip
