"""Picked drafts of requests whose rows are adjusted: the tokens are those of decoding without drafts."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InvalidRequest
from engine.sampling.step_sampler import StepSampler
from engine.speculation.request_drafts import SampledDrafts, judge_followed, judge_picked
from protocol.sampling import SamplingParams, Structure

TOKENS = [b"", b"a", b"b", b"c", b"ab", b"1"]
EOS = 0
MOST = 14
SAMPLINGS = {
    "presence": {"presence_penalty": 1.3},
    "frequency": {"frequency_penalty": 0.7, "temperature": 0.9},
    "repetition": {"repetition_penalty": 1.6, "temperature": 0.0},
    "bias": {"logit_bias": ((1, 2.0), (3, -1.5))},
    "minimum": {"min_tokens": 6, "temperature": 1.2},
    "stop": {"stop_token_ids": (5,), "temperature": 1.2},
    "grammar": {"structure": Structure("regex", "(a|b|c){3,9}"), "temperature": 1.0},
    "grammar behind reasoning": {
        "structure": Structure("regex", "(ab)+1?", begins_after=3), "temperature": 1.1,
    },
    "all": {
        "structure": Structure("regex", "[abc]{4,8}1"), "temperature": 1.0, "frequency_penalty": 1.0,
        "repetition_penalty": 1.2, "logit_bias": ((2, 1.0),), "top_p": 0.9,
    },
}  # fmt: skip
PROMPT = [1, 4, 2]


@pytest.fixture(scope="module")
def sampler() -> Iterator[StepSampler]:
    made = StepSampler(len(TOKENS), {EOS}, lambda: TOKENS)
    yield made
    made.close()


def row_after(ids: list[int]) -> np.ndarray:
    """A toy model's logits: any function of the tokens so far."""
    return (np.random.default_rng([7, len(ids), *ids]).standard_normal(len(TOKENS)) * 2).astype(np.float32)


def without_drafts(sampler: StepSampler, name: str, sampling: SamplingParams) -> list[int]:
    ids = list(PROMPT)
    while not ended(sampler, sampling, ids):
        ids.append(sampler.choose(row_after(ids), name, sampling, ids, len(PROMPT)).token_id)
    sampler.forget(name)
    return ids[len(PROMPT) :]


def ended(sampler: StepSampler, sampling: SamplingParams, ids: list[int]) -> bool:
    new = ids[len(PROMPT) :]
    return len(new) >= MOST or bool(new and new[-1] in sampler.ends(sampling))


def with_drafts(
    sampler: StepSampler, name: str, sampling: SamplingParams, truth: list[int], chance: random.Random
) -> tuple[list[int], int]:
    """The tokens, and how many drafts have held. Drafts are right more often than not, to any length."""
    ids, held = list(PROMPT), 0
    while not ended(sampler, sampling, ids):
        room = MOST - (len(ids) - len(PROMPT)) - 1
        right = truth[len(ids) - len(PROMPT) :] + [EOS] * room
        drafts = [
            token if chance.random() < 0.8 else chance.randrange(len(TOKENS))
            for token in right[: chance.randint(0, max(room, 0))]
        ]
        rows = [row_after(ids + drafts[:k]) for k in range(len(drafts) + 1)]
        verdict = judge_followed(
            sampler, rows, drafts, request_id=name, sampling=sampling, token_ids=ids, prompt=len(PROMPT)
        )
        held += verdict.accepted
        ids += verdict.tokens(drafts)
    sampler.forget(name)
    return ids[len(PROMPT) :], held


@pytest.mark.parametrize("name", SAMPLINGS)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 20))
def test_the_tokens_are_those_of_decoding_without_drafts(sampler: StepSampler, name: str, seed: int) -> None:
    sampling = SamplingParams(**{"temperature": 1.0, "seed": seed, "max_tokens": MOST, **SAMPLINGS[name]})
    held_by = sampler.check(sampling)  # the compiled grammar, kept meanwhile
    truth = without_drafts(sampler, "plain", sampling)
    found, _ = with_drafts(sampler, "drafted", sampling, truth, random.Random(seed))
    assert found == truth
    del held_by


def test_drafts_do_hold_under_a_grammar(sampler: StepSampler) -> None:
    held = 0
    for seed in range(20):
        sampling = SamplingParams(
            **{"temperature": 1.0, "seed": seed, "max_tokens": MOST, **SAMPLINGS["all"]}
        )
        sampler.check(sampling)
        truth = without_drafts(sampler, "plain", sampling)
        held += with_drafts(sampler, "drafted", sampling, truth, random.Random(seed))[1]
    assert held > 20


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("presence_penalty", "presence"), ("frequency_penalty", "frequency"),
        ("repetition_penalty", "repetition"), ("logit_bias", "bias"), ("min_tokens", "minimum"),
        ("structure", "grammar"),
    ],
)  # fmt: skip
def test_drafts_that_are_drawn_refuse_what_they_do_not_follow(field: str, name: str) -> None:
    sampling = SamplingParams(**SAMPLINGS[name])
    with pytest.raises(InvalidRequest, match=f"{field} is set.*judge_followed") as refused:
        SampledDrafts(sampling, 0)
    assert refused.value.parameter == field
    with pytest.raises(InvalidRequest, match=field):
        judge_picked([np.zeros(len(TOKENS), np.float32)], [], sampling, 0)
