"""Selection without sorting gives what a stable sort of the whole vocabulary gives."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.candidates import candidates, draw, largest, probabilities
from protocol.sampling import SamplingParams

# Few values, so that ties are common; some tokens are not allowed at all.
values = st.sampled_from([-np.inf, -3.0, -1.0, -0.5, 0.0, 0.25, 1.0, 4.0, 9.0])
rows = st.lists(values, min_size=1, max_size=60).map(lambda v: np.array([*v, 2.0], np.float32))
samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.integers(0, 70),
    top_p=st.sampled_from([1.0, 0.99, 0.7, 0.2, 1e-6]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)


def by_sorting(logits: np.ndarray, sampling: SamplingParams) -> dict[int, float]:
    """The definition: all weights, cut by min-p, then top-k, then top-p, each of what is left."""
    weights = np.exp((logits.astype(np.float64) - logits.max()) / sampling.temperature)
    order = np.argsort(-logits, kind="stable")
    order = order[weights[order] >= sampling.min_p] if sampling.min_p else order
    order = order[: sampling.top_k or None]
    kept = weights[order]
    if sampling.top_p < 1.0:
        # A margin, since sums in another order round otherwise: the boundary itself is not compared.
        before = np.cumsum(kept) - kept
        order = order[before < sampling.top_p * kept.sum()]
    return {int(index): float(weights[index]) for index in order}


@settings(max_examples=400, deadline=None)
@given(logits=rows, sampling=samplings)
def test_candidates_are_those_of_the_definition(logits: np.ndarray, sampling: SamplingParams) -> None:
    ids, weights = candidates(logits, sampling)
    found = dict(zip(ids.tolist(), weights.tolist(), strict=True))
    expected = by_sorting(logits, sampling)
    for index in found.keys() ^ expected.keys():  # only where rounding decides whether top_p is reached
        reached = sum(w for other, w in expected.items() if other != index)
        total = by_sorting(logits, SamplingParams(**{**_fields(sampling), "top_p": 1.0}))
        assert reached == pytest.approx(sampling.top_p * sum(total.values()), rel=1e-9)
    assert all(found[index] == expected[index] for index in found.keys() & expected.keys())
    assert int(logits.argmax()) in found


def _fields(sampling: SamplingParams) -> dict[str, float]:
    return {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p")}


@settings(max_examples=300, deadline=None)
@given(logits=rows, count=st.integers(1, 80))
def test_the_largest_are_those_of_a_stable_sort(logits: np.ndarray, count: int) -> None:
    assert largest(logits, count).tolist() == np.argsort(-logits, kind="stable")[:count].tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 5.0])
@pytest.mark.parametrize("top_p", [0.001, 0.5, 0.99, 0.999999])
def test_top_p_finds_its_tokens_among_many(temperature: float, top_p: float) -> None:
    logits = np.random.default_rng(3).standard_normal(20_000).astype(np.float32) * 3
    sampling = SamplingParams(temperature=temperature, top_p=top_p)
    ids, _ = candidates(logits, sampling)
    assert ids.tolist() == list(by_sorting(logits, sampling))


@settings(deadline=None)
@given(logits=rows, sampling=samplings)
def test_probabilities_are_the_weights_of_the_candidates(
    logits: np.ndarray, sampling: SamplingParams
) -> None:
    ids, weights = candidates(logits, sampling)
    found = probabilities(logits, sampling)
    np.testing.assert_allclose(found[ids], weights / weights.sum())
    assert found.sum() == pytest.approx(1.0)
    assert set(np.flatnonzero(found).tolist()) <= set(ids.tolist())


@settings(deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.0, 1e-300, 0.1, 1.0]), min_size=1).filter(any).map(np.array),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_what_has_no_weight_is_never_drawn(weights: np.ndarray, uniform: float) -> None:
    assert weights[draw(weights, uniform)] > 0.0
