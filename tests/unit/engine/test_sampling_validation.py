"""Refused sampling parameters name the field and its value."""

from typing import Any

import pytest

from engine.errors import InvalidRequest
from engine.sampling.validation import check_sampling
from protocol.sampling import SamplingParams, Structure


@pytest.mark.parametrize(
    ("fields", "parameter", "told"),
    [
        ({"temperature": 2.5}, "temperature", "temperature is 2.5; it must be between 0 and 2"),
        ({"temperature": float("nan")}, "temperature", "nan"),
        ({"top_p": 0.0}, "top_p", "top_p is 0.0"),
        ({"top_k": -1}, "top_k", "top_k is -1"),
        ({"min_p": 1.1}, "min_p", "min_p is 1.1"),
        ({"presence_penalty": -2.1}, "presence_penalty", "between -2 and 2"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty", "inf"),
        ({"repetition_penalty": 0.0}, "repetition_penalty", "repetition_penalty is 0.0"),
        ({"logprobs": 21}, "top_logprobs", "top_logprobs is 21; it must be between -1 and 20"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "prompt_logprobs is 21"),
        ({"min_tokens": -1}, "min_tokens", "min_tokens is -1"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "min_tokens is 9, more than max_tokens, 8"),
        ({"logit_bias": ((100, 1.0),)}, "logit_bias", "the token id 100, which lies outside"),
        ({"logit_bias": ((5, 101.0),)}, "logit_bias.5", "logit_bias.5 is 101.0"),
        ({"logit_bias": ((5, 1.0), (5, 2.0))}, "logit_bias", "names a token twice"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids", "the token id -1"),
        ({"ignore_eos": True, "structure": Structure("json_object")}, "ignore_eos", "says where"),
    ],
)  # fmt: skip
def test_the_field_and_its_value_are_named(fields: dict[str, Any], parameter: str, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told) as refused:
        check_sampling(SamplingParams(**fields), 100)
    assert refused.value.parameter == parameter


def test_what_is_within_its_bounds_is_taken() -> None:
    check_sampling(SamplingParams(), 1)
    check_sampling(
        SamplingParams(
            temperature=2.0, top_p=1e-6, top_k=2**31, min_p=1.0, presence_penalty=-2.0, logprobs=20,
            logit_bias=((99, -100.0), (0, 100.0)), stop_token_ids=(99,), min_tokens=256,
        ),
        100,
    )  # fmt: skip
