"""How many drafts of each request are worth checking (section 8.5). Pure.

A draft's survival is the estimated chance that it and all before it hold. A step's gain is the tokens that it
is expected to commit; of all numbers of drafts the one with the most gain a millisecond is taken.

What keeps the output's distribution, where drafts are *sampled*:
- Whether draft k is checked must not depend on draft k itself, but its successor's confidence does. Ranking
  is safe: survival never rises along a request, so a successor never pushes out the one before it.
- The number of drafts (`best_count`) sees all survivals, so it is taken of the step before: those drafts are
  settled, and the next ones are drawn with other noise (`engine.sampling.noise`).
Where drafts are *picked*, the likeliest each, they follow from what is already committed, and nothing can
lean on them: any number is safe, of the present step's survivals too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from engine.speculation.curves import CostCurve

Survivals = Sequence[float]  # of one request's drafts in order, never rising


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What a step costs beside its drafts: `num_requests` are drafted for, `num_rows` run without drafts."""

    draft: CostCurve  # by requests
    verify: CostCurve  # by rows
    num_requests: int
    num_rows: int

    def ms(self, drafts: int) -> float:
        return self.draft.ms(self.num_requests) + self.verify.ms(self.num_rows + drafts)


def survivals(confidences: Sequence[float]) -> list[float]:
    """S_k = c_0 ... c_k. A request without confidences yet has 1 for each of its drafts."""
    return list(accumulate((min(max(c, 0.0), 1.0) for c in confidences), mul))


def best_count(
    requests: Sequence[Survivals], num_sampling: int, ms: Callable[[int], float], most: int
) -> int:
    """The number b of drafts, 0 .. most, with the largest gain a millisecond; the least of equals.

    Gain: one sure token for each of `num_sampling` requests, and the b largest survivals. 0 is decoding
    without drafts.
    """
    ranked = sorted((s for request in requests for s in request), reverse=True)[: max(most, 0)]
    gains = list(accumulate(ranked, initial=float(num_sampling)))
    rates = [gain / ms(count) for count, gain in enumerate(gains)]
    return rates.index(max(rates))


def admit(requests: Sequence[Survivals], count: int) -> list[int]:
    """How many drafts of each request are among the `count` largest survivals of all.

    Of equals earlier drafts go first, then earlier requests, so that each request's are its first ones.
    """
    slots = sorted((-s, k, r) for r, request in enumerate(requests) for k, s in enumerate(request))
    lengths = [0] * len(requests)
    for _, _, request in slots[: max(count, 0)]:
        lengths[request] += 1
    return lengths


def plan_step(
    fresh: Sequence[Survivals], before: Sequence[Survivals], costs: StepCosts, num_sampling: int, most: int
) -> list[int]:
    """Drafts to check of each request: their number from the step before, their ranking from now.

    `before`: the same requests' survivals one step ago. For picked drafts `fresh` may be given for both.
    """
    return admit(fresh, best_count(before, num_sampling, costs.ms, most))
