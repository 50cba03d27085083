"""Whether sampling parameters can be used: each refusal names the field, its value and a way out."""

from engine.errors import InvalidRequest
from protocol.sampling import SamplingParams
from protocol.sampling_bounds import BOUNDS, outside

_WIRE_NAMES = {"logprobs": "top_logprobs"}  # what the API calls the number of alternatives
_MAX_BIAS = 100.0


def check_sampling(sampling: SamplingParams, vocabulary: int) -> None:
    """Raises InvalidRequest."""
    for name, (low, high) in BOUNDS.items():
        check_within(_WIRE_NAMES.get(name, name), getattr(sampling, name), low, high)
    if sampling.min_tokens > sampling.max_tokens:
        raise InvalidRequest(
            f"min_tokens is {sampling.min_tokens}, more than max_tokens, {sampling.max_tokens}",
            parameter="min_tokens", hint="lower it or raise max_tokens",
        )  # fmt: skip
    _check_bias(sampling, vocabulary)
    _check_ids("stop_token_ids", sampling.stop_token_ids, vocabulary)
    _check_ids("prompt_ids", sampling.forced_ids, vocabulary)
    if sampling.structure is not None and sampling.ignore_eos:
        raise InvalidRequest(
            f"ignore_eos is set, and {sampling.structure.field} says where the output ends",
            parameter="ignore_eos", hint="leave one of them out",
        )  # fmt: skip


def check_within(name: str, value: float, low: float, high: float) -> None:
    """Raises InvalidRequest for a value outside the bounds, or none at all."""
    if cause := outside(name, value, low, high):
        raise InvalidRequest(cause, parameter=name)


def _check_bias(sampling: SamplingParams, vocabulary: int) -> None:
    ids = [token for token, _ in sampling.logit_bias]
    if len(set(ids)) < len(ids):
        raise InvalidRequest("logit_bias names a token twice", parameter="logit_bias")
    _check_ids("logit_bias", ids, vocabulary)
    for token, bias in sampling.logit_bias:
        check_within(f"logit_bias.{token}", bias, -_MAX_BIAS, _MAX_BIAS)


def _check_ids(name: str, ids: "tuple[int, ...] | list[int]", vocabulary: int) -> None:
    foreign = next((token for token in ids if not 0 <= token < vocabulary), None)
    if foreign is not None:
        raise InvalidRequest(
            f"{name} has the token id {foreign}, which lies outside the vocabulary of {vocabulary}",
            parameter=name, hint=f"give ids from 0 to {vocabulary - 1}",
        )  # fmt: skip
