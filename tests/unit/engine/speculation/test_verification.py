"""Drafts change no distribution: of tokens, and of runs of them; nor any token where they are only picked."""

from collections import Counter

import numpy as np
import pytest
from chi_square import agrees, bound, statistic
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_models import VOCABULARY, draft_logits, runs, target_logits

from engine.sampling.noise import Purpose, uniform
from engine.sampling.sampler import choose
from engine.speculation.distribution import draw, probabilities
from engine.speculation.request_drafts import SampledDrafts, judge_picked
from engine.speculation.verification import Verdict, verify_greedy, verify_picked, verify_sampled
from protocol.sampling import SamplingParams

SEEDS = 4000


def noise(seed, purpose):
    return lambda k: uniform(seed, k, purpose)


def speculate(sampling, length, drafts_a_step):
    """Tokens of a request whose drafts are sampled."""
    tokens = []
    while len(tokens) < length:
        drafts = SampledDrafts(sampling, len(tokens))
        for _ in range(drafts_a_step):
            drafts.pick(draft_logits([*tokens, *drafts.token_ids]))
        rows = [target_logits([*tokens, *drafts.token_ids[:k]]) for k in range(drafts_a_step + 1)]
        tokens += drafts.judge(rows, drafts_a_step).tokens(drafts.token_ids)
    return tuple(tokens[:length])


SAMPLINGS = {
    "plain": {},
    "hot": {"temperature": 1.7},
    "top-k": {"top_k": 2},
    "top-p": {"top_p": 0.7, "temperature": 1.3},
}


@pytest.mark.parametrize(("name", "drafts"), [*((name, 3) for name in SAMPLINGS), ("plain", 0), ("plain", 1)])
def test_sampled_drafts_keep_the_distribution_of_runs(name, drafts):
    parameters = {"temperature": 1.0} | SAMPLINGS[name]
    counts = Counter(speculate(SamplingParams(seed=seed, **parameters), 3, drafts) for seed in range(SEEDS))
    assert agrees(counts, runs(3, SamplingParams(**parameters)))


def test_a_wrong_rule_is_found():
    """Always drawing from p after a rejection: what the statistic must see."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    counts = Counter()
    for seed in range(SEEDS):
        token = draw(q, uniform(seed, 0, Purpose.DRAFT))
        if uniform(seed, 0, Purpose.ACCEPT) * q[token] >= p[token]:
            token = draw(p, uniform(seed, 0, Purpose.RESAMPLE))
        counts[token] += 1
    assert statistic(counts, dict(enumerate(p))) > 4 * bound(3)


@pytest.mark.parametrize("draft", range(VOCABULARY))
def test_a_picked_draft_keeps_the_distribution(draft):
    p = [probabilities(target_logits([i]), SamplingParams(temperature=1.0)) for i in range(2)]
    counts = Counter()
    for seed in range(SEEDS):
        verdict = verify_picked(
            p.__getitem__, [draft], noise(seed, Purpose.ACCEPT), noise(seed, Purpose.RESAMPLE)
        )
        assert (verdict.next_id != draft) or verdict.accepted
        counts[verdict.tokens([draft])[0]] += 1
    assert agrees(counts, dict(enumerate(p[0])))
    assert abs(counts[draft] / SEEDS - p[0][draft]) < 0.03


@given(st.integers(0, 2**32), st.floats(0, 2), st.integers(0, 3), st.integers(0, 4), st.integers(0, 9))
@settings(max_examples=80, deadline=None)
def test_picked_drafts_change_no_token(seed, temperature, top_k, count, generated):
    """Whatever they are, the tokens are those that decoding without them chooses."""
    sampling = SamplingParams(seed=seed, temperature=temperature, top_k=top_k)
    plain = []
    for i in range(count + 1):
        plain.append(choose(target_logits(plain), sampling, generated + i))
    drafts = list(plain[:count])
    wrong = seed % (count + 1)
    if wrong < count:
        drafts[wrong] = (drafts[wrong] + 1) % VOCABULARY
    rows = [target_logits(drafts[:k]) for k in range(count + 1)]
    verdict = judge_picked(rows, drafts, sampling, generated)
    assert verdict == Verdict(wrong, plain[wrong])
    assert verdict.tokens(drafts) == plain[: verdict.committed]


def test_greedy_takes_the_lowest_of_equals():
    rows = [np.array(row, np.float32) for row in ([1, 5, 5], [7, 7, 0], [0, 0, 1])]
    assert verify_greedy(rows, [1, 0]) == Verdict(2, 2)
    assert verify_greedy(rows, [1, 1]) == Verdict(1, 0)
    assert verify_greedy(rows, [2, 0]) == Verdict(0, 1)
    assert verify_greedy(rows[:1], []) == Verdict(0, 1)


@given(
    st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any),
    st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any),
)
@settings(max_examples=60, deadline=None)
def test_the_rule_integrates_to_the_target(p, q):
    """Exactly, over a fine grid of accepting noise and every draft: no seed takes part."""
    p, q = np.array(p) / sum(p), np.array(q) / sum(q)
    found = np.zeros(3)
    for draft in q.nonzero()[0]:
        accepts = min(1.0, p[draft] / q[draft])
        found[draft] += q[draft] * accepts
        left = np.maximum(p - q, 0)
        if left.any():
            found += q[draft] * (1 - accepts) * left / left.sum()
    np.testing.assert_allclose(found, p, atol=1e-9)
    rejected = q > p
    for draft in q.nonzero()[0]:
        verdict = verify_sampled(
            [p, p].__getitem__, lambda _: q, [int(draft)], lambda _: 0.999999, lambda _: 0.5
        )
        assert verdict.accepted == (not rejected[draft] or p[draft] / q[draft] > 0.999999)
        assert p[verdict.next_id] > 0


def test_a_draft_that_the_target_excludes_never_holds():
    p, q = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    verdict = verify_sampled([p].__getitem__, lambda _: q, [1], lambda _: 0.0, lambda _: 0.99)
    assert verdict == Verdict(0, 0)


@given(st.integers(0, 10**6), st.floats(0, 2), st.integers(0, 5), st.floats(0.05, 1))
@settings(max_examples=60, deadline=None)
def test_the_distribution_is_the_samplers(seed, temperature, top_k, top_p):
    """The same noise cuts the same cumulative weights: the sampler's token has a chance, and agrees."""
    logits = np.random.default_rng(seed).standard_normal(12).astype(np.float32)
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    p = probabilities(logits, sampling)
    assert p.sum() == pytest.approx(1)
    assert p[choose(logits, sampling, 3)] > 0
    if temperature >= 1e-5 and top_k:
        assert (p > 0).sum() <= top_k


def test_the_sampler_draws_from_the_distribution():
    logits = target_logits([])
    for parameters in SAMPLINGS.values():
        sampling = SamplingParams(**({"temperature": 1.0} | parameters))
        counts = Counter(
            choose(logits, SamplingParams(seed=seed, **({"temperature": 1.0} | parameters)), 0)
            for seed in range(SEEDS)
        )
        assert agrees(counts, dict(enumerate(probabilities(logits, sampling))))


def test_every_use_of_noise_is_its_own():
    uses = [
        uniform(seed, index, purpose, anchor)
        for seed in (0, 1)
        for index in range(4)
        for purpose in Purpose
        for anchor in range(3)
    ]
    assert len(set(uses)) == len(uses)
    assert all(0 <= use < 1 for use in uses)


def test_a_draw_never_takes_what_has_no_weight():
    weights = np.array([0.0, 0.25, 0.0, 0.75, 0.0])
    assert [draw(weights, u) for u in (0.0, 0.24, 0.25, 0.99999999999999999)] == [1, 1, 3, 3]
