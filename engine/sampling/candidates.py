"""The tokens that temperature, min-p, top-k and top-p leave, with their weights.

Nothing sorts the vocabulary: what a cut needs is selected first. Ties go to the lowest ids everywhere, so
that the answer is that of a stable sort of the whole row (`tests/unit/engine/test_candidates.py`).
Shapes: V vocabulary, C candidates.
"""

import math

import numpy as np
from numpy.typing import NDArray

from engine.errors import InvalidLogits
from protocol.sampling import SamplingParams

Logits = NDArray[np.float32]  # [V]; -inf where a token is not allowed
Ids = NDArray[np.int64]  # [C]
Weights = NDArray[np.float64]  # [C], of which none is negative; they need not sum to 1

GREEDY_BELOW = 1e-5  # no second token keeps a measurable chance, and the quotients stay finite; as in vLLM
_STEPS = 512  # the last one takes all tokens whose weight is below 1e-13 of the largest


def check_logits(row: Logits) -> None:
    """Raises InvalidLogits for a row [V] from which nothing can be drawn: with NaN or infinity in it, or with
    no token that has a chance."""
    best = float(row.max())  # NaN where there is one
    if not math.isfinite(best):
        number = int(row.argmax())
        raise InvalidLogits(
            f"the model's logits are no distribution: that of token {number} is {best}",
            hint="other requests go on; if it comes again, look for damaged weights",
        )  # fmt: skip


def candidates(logits: Logits, sampling: SamplingParams) -> tuple[Ids, Weights]:
    """Ids and weights at a temperature of GREEDY_BELOW or more.

    Most likely first where top-k or top-p is set, else by id. min-p is taken of all tokens, top-k of what it
    leaves, top-p of the weights of what both leave: vLLM's order. The most likely token is always there.
    """
    best = float(logits.max())
    if sampling.top_k:
        ids = largest(logits, sampling.top_k)
        logits = logits[ids]
    else:
        ids = np.arange(len(logits))
    exponents = (logits.astype(np.float64) - best) / sampling.temperature
    weights = np.exp(exponents)
    if sampling.min_p > 0.0:
        kept = weights >= sampling.min_p  # the largest weight is 1
        ids, exponents, weights = ids[kept], exponents[kept], weights[kept]
    if sampling.top_p < 1.0:
        share = sampling.top_p * weights.sum()
        if not sampling.top_k:
            order = _enough(exponents, weights, share)
            ids, weights = ids[order], weights[order]
        reached = np.cumsum(weights)
        inside = reached - weights < share  # up to the one with which the share is reached
        ids, weights = ids[inside], weights[inside]
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
    found = np.flatnonzero(values > -np.inf)  # selection is slow where most are equal, as under a grammar
    if len(found) < len(values):
        rest = np.flatnonzero(values == -np.inf)[: max(count - len(found), 0)]
        return np.concatenate((found[largest(values[found], count)], rest))
    least = np.partition(values, len(values) - count)[len(values) - count]
    above = np.flatnonzero(values > least)
    tied = np.flatnonzero(values == least)[: count - len(above)]
    ids = np.concatenate((above, tied))
    return ids[np.argsort(-values[ids], kind="stable")]


def _enough(exponents: Weights, weights: Weights, share: float) -> Ids:
    """Positions of the most likely tokens, in order: so many that their weights surely reach the share.

    Found by the mass between marks, a sixteenth of a unit of the exponent apart. Sums in another order round
    otherwise, hence one step more.
    """
    steps = np.minimum(exponents * -16.0, _STEPS - 1).astype(np.intp)
    mass = np.bincount(steps, weights, _STEPS).cumsum()
    found = np.flatnonzero(steps <= int(np.searchsorted(mass, share)) + 1)
    return found[np.argsort(-exponents[found], kind="stable")]
