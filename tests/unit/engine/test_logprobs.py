"""Log probabilities: of the model's distribution, sorted, with a rank, whatever the request samples with."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.logprobs import logprobs_of

rows = st.lists(st.sampled_from([-2.0, 0.0, 0.5, 0.5, 3.0]), min_size=1, max_size=40).map(
    lambda v: np.array(v, np.float32)
)


@settings(deadline=None)
@given(logits=rows, token=st.integers(0, 39), num_top=st.integers(0, 20))
def test_they_are_those_of_the_softmax(logits: np.ndarray, token: int, num_top: int) -> None:
    token %= len(logits)
    found = logprobs_of(logits, token, num_top)
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    assert found.logprob == pytest.approx(exact[token])
    order = np.argsort(-logits, kind="stable")
    assert [top.token_id for top in found.top] == order[:num_top].tolist()
    assert [top.logprob for top in found.top] == pytest.approx(exact[order[:num_top]])
    assert order[found.rank - 1] == token


def test_extreme_logits_stay_finite() -> None:
    found = logprobs_of(np.array([1e4, -1e4, 0.0], np.float32), 1, 1)
    assert found.logprob == -2e4
    assert found.top[0].logprob == 0.0
