"""The distribution that a request samples from: what the sampler draws of, as a vector over the vocabulary.

Shapes: V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from protocol.sampling import SamplingParams

Logits = NDArray[np.float32]  # [V]
LogitRows = Sequence[Logits] | NDArray[np.float32]  # of successive tokens
Probabilities = NDArray[np.float64]  # [V], sums to 1
GREEDY_BELOW = 1e-5  # as in engine.sampling.sampler


def probabilities(logits: Logits, sampling: SamplingParams) -> Probabilities:
    """[V] with temperature, top-k and top-p in it; all on the likeliest token where the request is greedy.

    Ties go to the lowest ids; top-p counts in what top-k has left.
    """
    found = np.zeros(len(logits))
    if sampling.temperature < GREEDY_BELOW:
        found[logits.argmax()] = 1.0
        return found
    weights = np.exp((logits.astype(np.float64) - float(logits.max())) / sampling.temperature)
    if sampling.top_k == 0 and sampling.top_p >= 1.0:
        return weights / weights.sum()
    order = np.argsort(-logits, kind="stable")[: sampling.top_k or None]
    kept = weights[order]
    if sampling.top_p < 1.0:
        kept = kept[np.cumsum(kept) - kept < sampling.top_p * kept.sum()]
    found[order[: len(kept)]] = kept
    return found / found.sum()


def draw(weights: Probabilities, uniform: float) -> int:
    """An index by its weight, which need not sum to 1; never one of weight 0."""
    cumulative = weights.cumsum()
    index = int(np.count_nonzero(cumulative <= uniform * cumulative[-1]))
    return min(index, int(weights.nonzero()[0][-1]))
