"""Whether a nano has learnt enough for its figures to mean something: an under-trained model hides damage."""

import math
from dataclasses import dataclass

from engine.training.judging import Measured
from engine.training.paired import Effect
from engine.training.quality import Quality
from engine.training.variants import RANDOM_CHOICE, ZEROED

BITS_PER_BYTE = 1.37  # xz's on a part of the standard library
ZEROED_NATS, RECALL, ERRORS = 0.10, 0.8, 3.0
ACCEPTED = (0.45, 0.85)  # of first drafts


@dataclass(frozen=True, slots=True)
class GateLine:
    """`wanted`: in words. `measured_on`: the shipped weights, or those before the last part."""

    name: str
    value: float
    error: float
    wanted: str
    met: bool
    measured_on: str = "shipped weights"


def gate(quality: Quality, before: Effect | None, slack: float = 0.0) -> tuple[GateLine, ...]:
    """`before`: main KV in FP4 on the weights before the last part, or None where nobody measured it.

    `slack`: standard errors that a small sample's value may be beyond what is wanted without a miss.
    """
    first = quality.drafts.by_position[0] if quality.drafts.by_position else Measured(0.0, 0.0)
    zeroed, random = quality.effect(ZEROED).nats, quality.effect(RANDOM_CHOICE).nats
    xz, bits = quality.xz_bits_per_byte, quality.bits_per_byte

    def line(name: str, found: Measured, wanted: str, low: float, high: float = math.inf) -> GateLine:
        beyond = slack * found.error
        met = low - beyond <= found.value <= high + beyond
        return GateLine(name, found.value, found.error, wanted, met)

    return (
        line("held-out bits per byte", bits, f"below {BITS_PER_BYTE}", 0.0, BITS_PER_BYTE),
        line("the same against xz", bits, f"below xz on the same bytes, {xz:.3f}", 0.0, xz),
        line("compressed KV zeroed, nat", zeroed, f"≥ {ZEROED_NATS}", ZEROED_NATS),
        *_resolved(before),
        line("indexer's recall", quality.recall, f"≥ {RECALL}", RECALL),
        line(
            "random choice of groups, nat", random, f"costs more than {ERRORS:g} standard errors",
            ERRORS * random.error,
        ),
        line("first drafts accepted", first, f"{ACCEPTED[0]} to {ACCEPTED[1]}", *ACCEPTED),
    )  # fmt: skip


def _resolved(before: Effect | None) -> tuple[GateLine, ...]:
    """By divergence and by agreement, which tell more than the loss does. Not measured is not met."""
    measured_on = "weights before the last part"
    found = Measured(0.0, 0.0) if before is None else before.divergence
    changed = found if before is None else before.disagreement
    if before is not None:
        measured_on += f", {before.tokens:,} tokens"
    return tuple(
        GateLine(
            f"FP4 main KV, {name}", each.value, each.error, f"above {ERRORS:g} standard errors",
            before is not None and each.errors_from_zero > ERRORS, measured_on,
        )
        for name, each in (("divergence in nat", found), ("share of other likeliest tokens", changed))
    )  # fmt: skip
