"""How many drafts hold, and the token after them: the output is distributed as without drafts (section 8.4).

Shapes: m drafts, V vocabulary. The model has run the newest token and m drafts behind it in one forward, so
that row k of its logits decides the token in draft k's place, and row m the one behind all drafts. Pure.

| drafts are | rule | the tokens |
|---|---|---|
| picked, the likeliest each | `verify_chosen` | are those of decoding without drafts, whatever the seed |
| picked | `verify_picked` | have their distribution |
| sampled from q | `verify_sampled` | have their distribution |

The first two accept with the same chance, p(d); the first is what an engine uses. `verify_sampled` accepts
with chance sum(min(p, q)), and needs a q that follows from what was known before the draft was drawn.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.speculation.distribution import LogitRows, Probabilities, draw


@dataclass(frozen=True, slots=True)
class Verdict:
    """The first `accepted` drafts hold, and `next_id` comes after them."""

    accepted: int
    next_id: int

    @property
    def committed(self) -> int:
        """Tokens that a step gains; the model's rows behind as many are to be rolled back."""
        return self.accepted + 1

    def tokens(self, drafts: Sequence[int]) -> list[int]:
        return [*drafts[: self.accepted], self.next_id]


Uniforms = Callable[[int], float]
"""Noise in [0, 1) by the number of the row; each is asked for once at most."""


def verify_chosen(choose: Callable[[int], int], drafts: Sequence[int]) -> Verdict:
    """Drafts hold while they are what decoding without them chooses: `choose` says that of each row."""
    for k, draft in enumerate(drafts):
        chosen = choose(k)
        if chosen != draft:
            return Verdict(k, chosen)
    return Verdict(len(drafts), choose(len(drafts)))


def verify_greedy(logits: LogitRows, drafts: Sequence[int]) -> Verdict:
    """`logits`: m + 1 rows [V]. Ties go to the lowest id."""
    return verify_chosen(lambda k: int(logits[k].argmax()), drafts)


def verify_picked(
    target: Callable[[int], Probabilities], drafts: Sequence[int], accept: Uniforms, resample: Uniforms
) -> Verdict:
    """q has all its mass on each draft: accept with p(d); else draw from p without d.

    `target`: p of each of m + 1 rows, with temperature, top-k and top-p in it.
    """

    def one_hot(k: int) -> Probabilities:
        drafted = np.zeros_like(target(k))
        drafted[drafts[k]] = 1.0
        return drafted

    return verify_sampled(target, one_hot, drafts, accept, resample)


def verify_sampled(
    target: Callable[[int], Probabilities],
    drafted: Callable[[int], Probabilities],
    drafts: Sequence[int],
    accept: Uniforms,
    resample: Uniforms,
) -> Verdict:
    """Standard rejection: accept with min(1, p(d) / q(d)); else draw from (p - q)_+, normalised.

    `drafted`: q of each of m rows, which the draft was drawn from. Behind the last draft that holds the token
    is drawn from p itself.
    """
    for k, draft in enumerate(drafts):
        p, q = target(k), drafted(k)
        if accept(k) * q[draft] < p[draft]:
            continue
        left = np.maximum(p - q, 0.0)
        if not left.any():  # p = q but for rounding, and a draft that it has kept from being accepted
            left = p
        return Verdict(k, draw(left, resample(k)))
    return Verdict(len(drafts), draw(target(len(drafts)), resample(len(drafts))))
