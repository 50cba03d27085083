"""What a request of either route asks beside its prompt and sampling, `dockyard`'s own fields among it.

What values are allowed beyond the bounds here the engine says: tokens of the vocabulary, places between
blocks, an output that has not ended.
"""

from engine.errors import InvalidRequest
from gateway.chat_sampling import read_cache_salt, read_priority, within
from gateway.generation import Generation
from gateway.sampling_body import Extension, SamplingBody
from protocol.sampling import SamplingParams

MAX_SLACK_MS = 86_400_000  # a day
_MOST_IDS = 1 << 20
_NONE = Extension()


def read_generation(
    body: SamplingBody, choices: tuple[SamplingParams, ...], num_prompts: int = 1
) -> Generation:
    """All but the prompt and what reads the reply. Raises InvalidRequest."""
    asked = body.dockyard or _NONE
    begun, resumed = _begun(body, len(choices) * num_prompts)
    return Generation(
        (), choices, read_priority(body), cache_salt=read_cache_salt(body),
        slack_ms=within("dockyard.slack_ms", asked.slack_ms or 0.0, 0.0, MAX_SLACK_MS),
        generated_ids=begun, resumed=resumed, tells_ids=bool(body.return_token_ids),
    )  # fmt: skip


def _begun(body: SamplingBody, num_outputs: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What another request has given out of the same output, and where windows were run again there."""
    asked = body.dockyard or _NONE
    begun = _ids("dockyard.generated_ids", asked.generated_ids)
    resumed = _ids("dockyard.resumed", asked.resumed)
    if resumed and not begun:
        raise InvalidRequest(
            "dockyard.resumed is given, and dockyard.generated_ids is not", parameter="dockyard.resumed",
            hint="send both as the stream that has ended told them",
        )  # fmt: skip
    if begun and num_outputs > 1:
        raise InvalidRequest(
            f"dockyard.generated_ids is of one output, and {num_outputs} are asked for",
            parameter="dockyard.generated_ids",
            hint="go on with each by itself: choice k of a prompt has the seed plus k",
        )  # fmt: skip
    if begun and body.prompt_logprobs is not None:
        raise InvalidRequest(
            f"prompt_logprobs is {body.prompt_logprobs}, and the output has begun already",
            parameter="prompt_logprobs", hint="the request that began it tells them",
        )  # fmt: skip
    return begun, resumed


def _ids(name: str, ids: list[int] | None) -> tuple[int, ...]:
    if ids is not None and len(ids) > _MOST_IDS:
        raise InvalidRequest(f"{name} has {len(ids)} of them; at most {_MOST_IDS}", parameter=name)
    return tuple(int(within(name, token, 0, 2**31 - 1)) for token in ids or ())
