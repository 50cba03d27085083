"""The tokens that temperature, min-p, top-k and top-p leave, with their weights.

Nothing sorts the vocabulary: what a cut needs is selected first. Ties go to the lowest ids everywhere, so
that the answer is that of a stable sort of the whole row (`tests/unit/engine/test_candidates.py`).
Shapes: V vocabulary, C candidates.
"""

import numpy as np
from numpy.typing import NDArray

from protocol.sampling import SamplingParams

Logits = NDArray[np.float32]  # [V]; -inf where a token is not allowed
Ids = NDArray[np.int64]  # [C]
Weights = NDArray[np.float64]  # [C], of which none is negative; they need not sum to 1

GREEDY_BELOW = 1e-5  # no second token keeps a measurable chance, and the quotients stay finite; as in vLLM
_FIRST_GUESS = 256  # candidates that top-p looks at first; eight times as many where they do not suffice


def candidates(logits: Logits, sampling: SamplingParams) -> tuple[Ids, Weights]:
    """Ids and weights at a temperature of GREEDY_BELOW or more.

    Most likely first where top-k or top-p is set, else by id. min-p is taken of all tokens, top-k of what it
    leaves, top-p of the weights of what both leave: vLLM's order. The most likely token is always there.
    """
    best = float(logits.max())
    if sampling.top_k:
        ids = largest(logits, sampling.top_k)
        weights = _weights(logits[ids], best, sampling.temperature)
    else:
        ids, weights = np.arange(len(logits)), _weights(logits, best, sampling.temperature)
    if sampling.min_p > 0.0:
        kept = weights >= sampling.min_p  # the largest weight is 1
        ids, weights = ids[kept], weights[kept]
    if sampling.top_p < 1.0:
        ids, weights = _nucleus(ids, weights, logits, sampling)
    return ids, weights


def probabilities(logits: Logits, sampling: SamplingParams) -> Weights:
    """[V], sums to 1: what `choose` draws from; all on the most likely token where the request is greedy."""
    found = np.zeros(len(logits))
    if sampling.temperature < GREEDY_BELOW:
        found[logits.argmax()] = 1.0
        return found
    ids, weights = candidates(logits, sampling)
    found[ids] = weights
    return found / found.sum()


def draw(weights: Weights, uniform: float) -> int:
    """An index by its weight; never one of weight 0. `uniform` lies in [0, 1)."""
    cumulative = weights.cumsum()
    index = int(np.count_nonzero(cumulative <= uniform * cumulative[-1]))
    return index if index < len(weights) and weights[index] > 0.0 else int(weights.nonzero()[0][-1])


def largest(values: NDArray[np.floating], count: int) -> Ids:
    """Positions of the largest values, the largest first, ties by position; all where there are no more."""
    if count >= len(values):
        return np.argsort(-values, kind="stable")
    least = np.partition(values, len(values) - count)[len(values) - count]
    above = np.flatnonzero(values > least)
    tied = np.flatnonzero(values == least)[: count - len(above)]
    ids = np.concatenate((above, tied))
    return ids[np.argsort(-values[ids], kind="stable")]


def _weights(logits: Logits, best: float, temperature: float) -> Weights:
    return np.exp((logits.astype(np.float64) - best) / temperature)


def _nucleus(ids: Ids, weights: Weights, logits: Logits, sampling: SamplingParams) -> tuple[Ids, Weights]:
    """The most likely tokens, up to the one with which their weights reach top_p of all."""
    share = sampling.top_p * weights.sum()
    ordered = sampling.top_k > 0
    count = len(ids) if ordered else min(_FIRST_GUESS, len(ids))
    while True:
        # By logit, not by weight: weights of unequal logits can round to equal ones.
        order = np.arange(len(ids)) if ordered else largest(logits[ids], count)
        kept = weights[order]
        reached = np.cumsum(kept)
        if reached[-1] >= share or count == len(ids):
            inside = reached - kept < share
            return ids[order][inside], kept[inside]
        count = min(8 * count, len(ids))
