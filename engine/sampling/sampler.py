"""Chooses one token from one row of logits. The choice depends on its arguments alone."""

from collections.abc import Collection

from engine.sampling.adjustments import Allowed, adjust, needs_past
from engine.sampling.candidates import GREEDY_BELOW, Logits, candidates, check_logits, draw
from engine.sampling.noise import Purpose, uniform
from engine.sampling.past import NOTHING, Past
from protocol.sampling import SamplingParams


def choose(
    logits: Logits,
    sampling: SamplingParams,
    generated: int,
    past: Past = NOTHING,
    *,
    ends: Collection[int] = (),
    allowed: Allowed | None = None,
) -> int:
    """The next token; `generated` counts the tokens before it. Ties go to the lowest id.

    `past` is needed where `needs_past` says so. `ends` and `allowed` are those of `adjust`.
    Raises InvalidLogits.
    """
    if generated < len(sampling.forced_ids):
        return sampling.forced_ids[generated]
    assert past is not NOTHING or not needs_past(sampling), "penalties need the tokens before"
    row = adjust(logits, sampling, past, generated, ends=ends, allowed=allowed)
    check_logits(row)
    if sampling.temperature < GREEDY_BELOW:
        return int(row.argmax())
    ids, weights = candidates(row, sampling)
    return int(ids[draw(weights, uniform(sampling.seed, generated, Purpose.CHOOSE))])
