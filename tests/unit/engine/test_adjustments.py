"""Bias, penalties, minimum length, grammar masks: each by its definition, none where it is not asked for."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.adjustments import adjust
from engine.sampling.past import NOTHING, Past
from engine.sampling.sampler import choose
from protocol.sampling import SamplingParams

V = 12
rows = st.lists(st.floats(-20, 20, width=32), min_size=V, max_size=V).map(lambda v: np.array(v, np.float32))
ids = st.lists(st.integers(0, V - 1), max_size=30)


@settings(deadline=None)
@given(logits=rows, prompt=ids, generated=ids)
def test_a_request_that_asks_for_nothing_gets_the_row_itself(
    logits: np.ndarray, prompt: list[int], generated: list[int]
) -> None:
    sampling = SamplingParams(temperature=0.7, top_k=3, min_tokens=len(generated))
    assert adjust(logits, sampling, Past.of(prompt, generated), len(generated), ends=(1,)) is logits


@settings(deadline=None)
@given(
    logits=rows, prompt=ids, generated=ids,
    strengths=st.tuples(st.floats(-2, 2), st.floats(-2, 2), st.floats(0.5, 2)),
)  # fmt: skip
def test_penalties_are_those_of_their_definition(
    logits: np.ndarray, prompt: list[int], generated: list[int], strengths: tuple[float, float, float]
) -> None:
    """Repetition looks at the prompt too, frequency and presence at the output alone."""
    presence, frequency, repetition = strengths
    sampling = SamplingParams(
        presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition
    )
    before = logits.copy()
    row = adjust(logits, sampling, Past.of(prompt, generated), len(generated))
    for token in range(V):
        expected = float(logits[token])
        if token in prompt or token in generated:
            expected = expected / repetition if expected > 0 else expected * repetition
        expected -= frequency * generated.count(token) + presence * (token in generated)
        assert row[token] == pytest.approx(expected, rel=1e-4, abs=1e-4)
    np.testing.assert_array_equal(logits, before)


@settings(deadline=None)
@given(prompt=ids, generated=ids, cut=st.integers(0, 30))
def test_a_past_is_the_same_whenever_it_is_counted(prompt: list[int], generated: list[int], cut: int) -> None:
    steps = Past.of(prompt, generated[:cut])
    steps.extend(generated[cut:])
    whole = Past.of(prompt, generated)
    assert steps.counts == whole.counts
    assert steps.num_counted == len(generated)
    assert steps.prompt_ids.tolist() == whole.prompt_ids.tolist() == sorted(set(prompt))


@settings(deadline=None)
@given(logits=rows, bias=st.dictionaries(st.integers(0, V - 1), st.floats(-100, 100, width=32)))
def test_bias_is_added(logits: np.ndarray, bias: dict[int, float]) -> None:
    row = adjust(logits, SamplingParams(logit_bias=tuple(bias.items())), NOTHING, 0)
    expected = [np.float32(value) + np.float32(bias.get(token, 0.0)) for token, value in enumerate(logits)]
    np.testing.assert_array_equal(row, np.array(expected, np.float32))


@settings(deadline=None)
@given(logits=rows, seed=st.integers(0, 99), allowed=st.sets(st.integers(0, V - 1), min_size=1))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_what_is_allowed_is_chosen(
    logits: np.ndarray, seed: int, allowed: set[int], temperature: float
) -> None:
    mask = np.isin(np.arange(V), list(allowed))
    sampling = SamplingParams(
        temperature=temperature, seed=seed, top_k=4, logit_bias=((3, 100.0),), presence_penalty=2.0
    )
    assert choose(logits, sampling, 5, Past.of([1, 2], [3] * 5), allowed=mask) in allowed


def test_nothing_ends_before_the_minimum_but_a_grammar_that_is_complete() -> None:
    logits = np.array([9.0, 8.0, 1.0, 0.0], np.float32)
    sampling = SamplingParams(min_tokens=2)
    assert [choose(logits, sampling, n, ends=(0, 1)) for n in range(3)] == [2, 2, 0]
    only_the_end = np.array([True, False, False, False])
    assert choose(logits, sampling, 0, ends=(0, 1), allowed=only_the_end) == 0


def test_penalties_without_the_tokens_before_are_a_fault_of_ours() -> None:
    with pytest.raises(AssertionError, match="penalties need"):
        choose(np.zeros(V, np.float32), SamplingParams(presence_penalty=1.0), 0)


@settings(deadline=None)
@given(logits=rows, neighbours=st.integers(1, 5), seed=st.integers(0, 99), at=st.integers(0, 4))
def test_a_row_among_others_gives_what_it_gives_alone(
    logits: np.ndarray, neighbours: int, seed: int, at: int
) -> None:
    sampling = SamplingParams(temperature=1.0, seed=seed, top_p=0.9, frequency_penalty=0.5)
    past = Past.of([1], [2, 2, 3])
    batch = np.random.default_rng(seed).standard_normal((neighbours + 1, V)).astype(np.float32)
    at %= len(batch)
    batch[at] = logits
    assert choose(batch[at], sampling, 3, past) == choose(logits, sampling, 3, past)
