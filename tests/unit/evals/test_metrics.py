from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals.metrics import Tally, pass_at_k, rates_of_planned, rates_of_scored
from protocol.errors import InvalidInput


@pytest.mark.parametrize(
    ("attempts", "passed", "k", "value"),
    [
        (1, 0, 1, 0.0),
        (1, 1, 1, 1.0),
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),  # 1 - C(3,2)/C(4,2) = 1 - 3/6
        (5, 2, 3, 0.9),  # 1 - C(3,3)/C(5,3) = 1 - 1/10
        (5, 3, 3, 1.0),  # three draws from five cannot avoid all three
        (10, 0, 10, 0.0),
        (200, 200, 100, 1.0),
    ],
)
def test_known_answers(attempts, passed, k, value):
    assert pass_at_k(attempts, passed, k) == pytest.approx(value, rel=1e-12)


@given(st.data())
def test_is_the_share_of_draws_that_hold_a_pass(data):
    attempts = data.draw(st.integers(1, 8))
    passed = data.draw(st.integers(0, attempts))
    k = data.draw(st.integers(1, attempts))
    draws = list(combinations([True] * passed + [False] * (attempts - passed), k))
    assert pass_at_k(attempts, passed, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize(
    ("attempts", "passed", "k"), [(3, 1, 4), (3, 1, 0), (3, 4, 1), (3, -1, 1), (0, 0, 1)]
)
def test_impossible_counts_are_refused(attempts, passed, k):
    with pytest.raises(InvalidInput):
        pass_at_k(attempts, passed, k)


def test_two_denominators():
    tallies = [Tally(planned=4, scored=4, passed=1), Tally(planned=4, scored=2, passed=1)]
    planned = rates_of_planned(tallies, (1, 2, 4))
    assert (planned.attempts, planned.passed) == (8, 2)
    # both problems: 1/4, and 1 - C(3,2)/C(4,2) = 1/2, and 1
    assert planned.pass_at == {1: 0.25, 2: 0.5, 4: 1.0}
    scored = rates_of_scored(tallies, (1, 2, 4))
    assert (scored.attempts, scored.passed) == (6, 2)
    # 1/4 and 1/2; 1/2 and 1; only the first problem has four scored attempts
    assert scored.pass_at == {1: 0.375, 2: 0.75, 4: 1.0}
    assert scored.problems_at == {1: 2, 2: 2, 4: 1}


def test_nothing_scored_is_not_zero():
    rates = rates_of_scored([Tally(planned=2, scored=0, passed=0)], (1,))
    assert rates.pass_at == {1: None}
    assert rates.problems_at == {1: 0}


@pytest.mark.parametrize("counts", [(1, 2, 0), (2, 1, 2), (1, 1, -1)])
def test_impossible_tallies_are_refused(counts):
    with pytest.raises(InvalidInput):
        Tally(*counts)
