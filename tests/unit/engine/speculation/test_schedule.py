"""Numbers of drafts: the most gain a millisecond, prefixes, and a distribution that stays what it is."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from chi_square import agrees, bound, statistic
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_models import draft_logits, runs, target_logits

from engine.errors import InvalidRequest
from engine.sampling.noise import Purpose, uniform
from engine.speculation.curves import LEAST_MS, CostCurve
from engine.speculation.distribution import draw
from engine.speculation.request_drafts import SampledDrafts
from engine.speculation.schedule import StepCosts, admit, best_count, plan_step, survivals
from engine.speculation.verification import verify_sampled
from protocol.sampling import SamplingParams

CONFIDENCES = st.lists(st.lists(st.floats(0, 1), max_size=5), max_size=5)


@given(CONFIDENCES, st.integers(0, 30))
def test_admitted_drafts_are_prefixes_of_the_largest_survivals(confidences, count):
    requests = [survivals(c) for c in confidences]
    lengths = admit(requests, count)
    assert all(0 <= length <= len(request) for length, request in zip(lengths, requests, strict=True))
    assert sum(lengths) == min(count, sum(map(len, requests)))
    inside = [s for length, r in zip(lengths, requests, strict=True) for s in r[:length]]
    outside = [s for length, r in zip(lengths, requests, strict=True) for s in r[length:]]
    assert not inside or not outside or min(inside) >= max(outside)


@given(CONFIDENCES, st.integers(1, 6), st.integers(0, 30), st.lists(st.floats(0.1, 9), min_size=1))
def test_the_count_is_the_best_of_all(confidences, num_sampling, most, times):
    requests = [survivals(c) for c in confidences]
    curve = CostCurve.measured({size: [ms] for size, ms in enumerate(times)})
    chosen = best_count(requests, num_sampling, curve.ms, most)
    ranked = sorted((s for r in requests for s in r), reverse=True)[:most]
    rates = [(num_sampling + sum(ranked[:b])) / curve.ms(b) for b in range(len(ranked) + 1)]
    assert rates[chosen] == pytest.approx(max(rates))


def test_cheap_rows_are_filled_and_dear_ones_left():
    sure, vague = survivals([0.9, 0.9, 0.9]), survivals([0.3, 0.3, 0.3])
    flat = CostCurve.measured({1: [5.0], 64: [5.0]})
    steep = CostCurve.measured({1: [1.0], 64: [64.0]})
    free = CostCurve.measured({1: [0.0]})
    assert plan_step([sure, vague], [sure, vague], StepCosts(free, flat, 2, 2), 2, 99) == [3, 3]
    assert plan_step([sure, vague], [sure, vague], StepCosts(free, steep, 2, 2), 2, 99) == [0, 0]
    dear_drafts = CostCurve.measured({1: [30.0]})
    assert plan_step([sure, vague], [sure, vague], StepCosts(dear_drafts, steep, 2, 2), 2, 99) == [3, 1]
    assert plan_step([sure, vague], [sure, vague], StepCosts(free, flat, 2, 2), 2, 2) == [2, 0]


def test_a_curve_steps_then_runs_straight():
    runs = {4: [3.0, 1.0, 2.0], 1: [2.5, 2.5], 8: [4.0], 16: [8.0], 32: [10.0]}
    curve = CostCurve.measured(runs, step_limit=8)
    assert [curve.ms(n) for n in (0, 1, 2, 4, 5, 8)] == [2.5, 2.5, 2.5, 2.5, 4, 4]
    assert [curve.ms(n) for n in (12, 16, 24, 32, 48)] == pytest.approx([6, 8, 9, 10, 12])
    assert CostCurve.measured({3: [0.0]}).ms(77) == LEAST_MS


@given(st.dictionaries(st.integers(0, 64), st.lists(st.floats(0, 99), min_size=1, max_size=5), min_size=1),
       st.integers(0, 64))  # fmt: skip
def test_a_larger_step_never_costs_less(runs, limit):
    curve = CostCurve.measured(runs, limit)
    times = [curve.ms(n) for n in range(100)]
    assert all(later >= earlier - 1e-9 for earlier, later in pairwise(times))
    assert times[0] >= LEAST_MS


def test_a_curve_needs_measurements():
    for measured in ({}, {3: []}):
        with pytest.raises(InvalidRequest, match="one or more of each of one size or more"):
            CostCurve.measured(measured)


P = [np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.2, 0.7])]
Q = np.array([0.3, 0.4, 0.3])


def _first_tokens(count_of):
    """What a request commits first, where the number of checked drafts is `count_of` the step's confidences.

    The second draft's confidence tells the first draft, as a confidence head's may.
    """
    counts = Counter()
    for seed in range(6000):
        drafts = [draw(Q, uniform(seed, k, Purpose.DRAFT)) for k in range(2)]
        confidences = [0.8, 0.9 if drafts[0] == 0 else 0.05]
        count = count_of(survivals(confidences), seed)
        verdict = verify_sampled(
            [*P, P[0]].__getitem__,
            lambda _: Q,
            drafts[:count],
            lambda k, seed=seed: uniform(seed, k, Purpose.ACCEPT),
            lambda k, seed=seed: uniform(seed, k, Purpose.RESAMPLE),
        )
        counts[verdict.tokens(drafts)[0]] += 1
    return counts


def test_a_count_from_the_step_before_and_fresh_ranks_keep_the_distribution():
    other = survivals([0.7, 0.3])

    def count(own, seed):
        return admit([own, other], seed % 5)[0]  # any number that does not know these drafts

    assert agrees(_first_tokens(count), dict(enumerate(P[0])))


def test_a_count_from_the_present_step_does_not():
    """Why it is taken of the step before: here it says no draft at all unless the first draft is 0."""

    def count(own, seed):
        return best_count([own], 1, [1.0, 1.75, 2.2].__getitem__, 2)

    assert count(survivals([0.8, 0.9]), 0) == 2
    assert count(survivals([0.8, 0.05]), 0) == 1
    counts = _first_tokens(lambda own, seed: 2 * (best_count([own], 1, [1.0, 1.85, 2.2].__getitem__, 2) > 0))
    assert statistic(counts, dict(enumerate(P[0]))) > 4 * bound(3)


def _scheduled(seed, lengths):
    """Three tokens of a request beside another; confidences tell of the drafts that they are behind."""
    sampling, tokens = SamplingParams(temperature=1.0, seed=seed), []
    before, other, ms = [1.0, 1.0], [0.75, 0.3], [1.0, 1.35, 1.7, 1.98, 2.4].__getitem__
    while len(tokens) < 3:
        drafts = SampledDrafts(sampling, len(tokens))
        confidences = [0.7]
        for k in range(2):
            token = drafts.pick(draft_logits([*tokens, *drafts.token_ids]))
            confidences += [0.95 if token in {0, k + 1} else 0.1]
        fresh = survivals(confidences[:2])
        count = admit([fresh, other], best_count([before, other], 2, ms, 4))[0]
        lengths[count] += 1
        rows = [target_logits([*tokens, *drafts.token_ids[:k]]) for k in range(count + 1)]
        tokens += drafts.judge(rows, count).tokens(drafts.token_ids)
        before = fresh
    return tuple(tokens[:3])


def test_a_scheduled_request_keeps_the_distribution_of_its_runs():
    """Step after step, with the drafts that nobody looked at deciding the next step's count."""
    lengths = Counter()
    counts = Counter(_scheduled(seed, lengths) for seed in range(5000))
    assert min(lengths[0], lengths[1], lengths[2]) > 1000
    assert agrees(counts, runs(3, SamplingParams(temperature=1.0)))


@given(CONFIDENCES)
@settings(max_examples=30)
def test_survival_never_rises(confidences):
    for request in map(survivals, confidences):
        assert all(0 <= later <= earlier for earlier, later in pairwise(request))
