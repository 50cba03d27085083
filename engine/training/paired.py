"""Two ways of running a model on the same text, compared row by row: for nano, and for any other.

T rows, V vocabulary. Since they tell smaller changes than the loss does, the divergence from the unchanged
distribution and how often the likeliest token stays stand beside it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.training.judging import Measured, Window, ratio


@dataclass(frozen=True, slots=True)
class Difference:
    """What a change did to rows of one window, summed over them."""

    rows: int
    num_bytes: int  # of the tokens that the rows predict
    nats: float
    divergence: float
    agreed: int  # rows whose likeliest token stays


@dataclass(frozen=True, slots=True)
class Effect:
    """Against the unchanged model. Positive costs."""

    name: str
    nats: Measured  # a token
    bits_per_byte: Measured
    divergence: Measured  # nats a token
    disagreement: Measured  # share of rows whose likeliest token does not stay
    tokens: int

    @property
    def agreement(self) -> float:
        return 1.0 - self.disagreement.value


def compared(base_TV: Tensor, other_TV: Tensor, window: Window, rows: slice) -> Difference:
    """Logits of the window's `rows`, of which the last one's next token is in the window."""
    places = slice(rows.start + 1, rows.stop + 1)
    wanted = torch.tensor(window.ids[places]).unsqueeze(1)
    before, after = torch.log_softmax(base_TV, -1), torch.log_softmax(other_TV, -1)
    return Difference(
        rows=len(wanted),
        num_bytes=sum(window.sizes[places]),
        nats=float((before.gather(1, wanted) - after.gather(1, wanted)).double().sum()),
        divergence=float((before.exp() * (before - after)).sum(-1).double().sum()),
        agreed=int((base_TV.argmax(-1) == other_TV.argmax(-1)).sum()),
    )


def effect(name: str, differences: Sequence[Difference]) -> Effect:
    """Of all windows together."""
    rows = [each.rows for each in differences]
    bits = [each.nats / math.log(2) for each in differences]
    return Effect(
        name=name,
        nats=ratio([each.nats for each in differences], rows),
        bits_per_byte=ratio(bits, [each.num_bytes for each in differences]),
        divergence=ratio([each.divergence for each in differences], rows),
        disagreement=ratio([each.rows - each.agreed for each in differences], rows),
        tokens=sum(rows),
    )
