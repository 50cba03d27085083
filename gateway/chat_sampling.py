"""How a request's tokens are chosen, out of its body. What values are allowed the engine says, by name."""

import secrets
from dataclasses import replace

from engine.errors import ContextExceeded, InvalidRequest
from gateway.chat_body import ChatBody
from gateway.config import GatewayConfig
from gateway.sampling_body import SamplingBody
from protocol.sampling import SamplingParams, Structure
from protocol.sampling_bounds import BOUNDS, MAX_LOGPROBS, outside

_STOP_CHARS = 512  # of one string: each token's text is searched for all of it
_MOST_STOPS = 16
_SALT_CHARS = 1024
_MOST_BIASES = 1024  # as vLLM; OpenAI has 300


def read_sampling(
    body: SamplingBody, max_tokens: int, logprobs: int, structure: Structure | None
) -> SamplingParams:
    """`logprobs`: as in SamplingParams. Raises InvalidRequest."""
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=within(
            "temperature", 1.0 if body.temperature is None else body.temperature, *BOUNDS["temperature"]
        ),
        top_p=within("top_p", 1.0 if body.top_p is None else body.top_p, *BOUNDS["top_p"]),
        top_k=int(within("top_k", max(body.top_k or 0, 0), *BOUNDS["top_k"])),  # -1 keeps all, as in vLLM
        # Without a seed each request draws its own noise, as clients that sample twice expect.
        seed=secrets.randbits(32) if body.seed is None else int(within("seed", body.seed, -(2**62), 2**62)),
        stop=_stops(body.stop),
        stop_token_ids=_ids("stop_token_ids", body.stop_token_ids),
        ignore_eos=bool(body.ignore_eos),
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=_bias(body.logit_bias),
        min_tokens=int(within("min_tokens", body.min_tokens or 0, *BOUNDS["min_tokens"])),
        include_stop=bool(body.include_stop_str_in_output),
        logprobs=logprobs,
        prompt_logprobs=_prompt_logprobs(body),
        structure=structure,
    )


def read_max_tokens(
    asked: int | None, default: int, num_prompt: int, max_positions: int, *, needed: int, parameter: str
) -> int:
    """What was asked for, or the default as far as there is room.

    `needed`: tokens of the output at least. Raises InvalidRequest.
    """
    room = max_positions - num_prompt
    if room < needed:
        raise ContextExceeded.of(
            max_positions,
            f"you requested {num_prompt + needed} tokens ({num_prompt} in the {parameter}, {needed} in the "
            "completion)",
            parameter=parameter, please=f"reduce the length of the {parameter} or of the completion",
        )  # fmt: skip
    return at_least("max_tokens", min(default, room) if asked is None else asked, 1)


def read_choices(
    body: SamplingBody, sampling: SamplingParams, config: GatewayConfig
) -> tuple[SamplingParams, ...]:
    """One set of parameters a choice, each with its own seed. Raises InvalidRequest."""
    count = int(within("n", 1 if body.n is None else body.n, 1, config.max_choices))
    return tuple(replace(sampling, seed=sampling.seed + index) for index in range(count))


def read_priority(body: SamplingBody) -> int:
    """Raises InvalidRequest."""
    return int(within("priority", body.priority or 0, -(2**31), 2**31))


def read_cache_salt(body: SamplingBody) -> str:
    """Requests share cached prefixes with those of the same salt alone. Raises InvalidRequest."""
    salt = body.cache_salt
    if salt is None:
        return ""
    if not 0 < len(salt) <= _SALT_CHARS:
        raise InvalidRequest(
            f"cache_salt has {len(salt)} characters, expected 1 to {_SALT_CHARS}",
            parameter="cache_salt", hint="leave it out to share cached prefixes with all that have none",
        )  # fmt: skip
    return salt


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    """Raises InvalidRequest for too many, or too long ones."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > _MOST_STOPS:
        raise InvalidRequest(f"stop has {len(stops)} strings; at most {_MOST_STOPS}", parameter="stop")
    if (longest := max(map(len, stops), default=0)) > _STOP_CHARS:
        raise InvalidRequest(
            f"stop has a string of {longest} characters; at most {_STOP_CHARS}", parameter="stop"
        )
    return stops


def within(name: str, value: float, low: float, high: float) -> float:
    """The value. Raises InvalidRequest where it lies outside the bounds."""
    if cause := outside(name, value, low, high):
        raise InvalidRequest(cause, parameter=name)
    return value


def at_least(name: str, value: int, low: int) -> int:
    """The value. Raises InvalidRequest where it is lower."""
    if value < low:
        raise InvalidRequest(f"{name} is {value}; it must be at least {low}", parameter=name)
    return value


def chat_logprobs(body: ChatBody) -> int:
    """Alternatives to tell of each token, or -1. Raises InvalidRequest."""
    if not body.logprobs:
        if body.top_logprobs:
            raise InvalidRequest(
                f"top_logprobs is {body.top_logprobs}, and logprobs is not true", parameter="top_logprobs",
                hint="send logprobs: true too",
            )  # fmt: skip
        return -1
    return int(within("top_logprobs", body.top_logprobs or 0, 0, MAX_LOGPROBS))


def _prompt_logprobs(body: SamplingBody) -> int:
    """vLLM's: alternatives for each token of the prompt."""
    if body.prompt_logprobs is None:
        return -1
    if body.stream:
        raise InvalidRequest(
            f"prompt_logprobs is {body.prompt_logprobs}, and the answer is a stream",
            parameter="prompt_logprobs", hint="leave out stream",
        )  # fmt: skip
    return int(within("prompt_logprobs", body.prompt_logprobs, 0, MAX_LOGPROBS))


def _bias(bias: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
    """Token ids are strings in JSON."""
    if bias is not None and len(bias) > _MOST_BIASES:
        raise InvalidRequest(
            f"logit_bias has {len(bias)} tokens; at most {_MOST_BIASES}", parameter="logit_bias"
        )
    foreign = next((key for key in bias or () if not _is_id(key)), None)
    if foreign is not None:
        raise InvalidRequest(
            f"logit_bias has {foreign[:40]!r}, which is no token id", parameter="logit_bias",
            hint='send ids of tokens: {"1234": -100}',
        )  # fmt: skip
    return tuple((int(key), value) for key, value in (bias or {}).items())


def _ids(name: str, ids: list[int] | None) -> tuple[int, ...]:
    if ids is not None and len(ids) > _MOST_BIASES:
        raise InvalidRequest(f"{name} has {len(ids)} tokens; at most {_MOST_BIASES}", parameter=name)
    for token in ids or ():
        within(name, token, 0, 2**31)
    return tuple(ids or ())


def _is_id(key: str) -> bool:
    return key.isascii() and key.isdigit() and len(key) <= 9
