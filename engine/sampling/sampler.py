"""Chooses one token from one row of logits. The choice depends on (logits, parameters, position) alone."""

import numpy as np
from numpy.typing import NDArray

from protocol.sampling import SamplingParams

Logits = NDArray[np.float32]
_GREEDY_BELOW = 1e-5  # no second token keeps a measurable chance, and the quotients stay finite; as in vLLM


def choose(logits: Logits, sampling: SamplingParams, generated: int) -> int:
    """The next token; `generated` counts the tokens before it. Ties go to the lowest id."""
    if generated < len(sampling.forced_ids):
        return sampling.forced_ids[generated]
    if sampling.temperature < _GREEDY_BELOW:
        return int(logits.argmax())
    ids, probabilities = _candidates(logits, sampling)
    cumulative: NDArray[np.float64] = probabilities.cumsum()
    threshold = _uniform(sampling.seed, generated) * cumulative[-1]
    index = int(np.count_nonzero(cumulative <= threshold))
    return int(ids[min(index, len(ids) - 1)])


def _candidates(logits: Logits, sampling: SamplingParams) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Ids and weights that top-k and top-p keep, most likely first where they cut anything.

    top-p counts in what top-k has left, as in vLLM.
    """
    weights = np.exp((logits.astype(np.float64) - float(logits.max())) / sampling.temperature)
    if sampling.top_k == 0 and sampling.top_p >= 1.0:
        return np.arange(len(weights)), weights
    order = np.argsort(-logits, kind="stable")[: sampling.top_k or None]
    kept = weights[order]
    if sampling.top_p < 1.0:
        before = np.cumsum(kept) - kept
        kept = kept[before < sampling.top_p * kept.sum()]
    return order[: len(kept)], kept


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1), a function of seed and position: a counter-based generator needs no state."""
    generator = np.random.Philox(key=seed & (2**64 - 1), counter=position)
    return float(np.random.Generator(generator).random())
