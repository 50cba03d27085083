"""Whether a nano has learnt enough for its figures to mean something: an under-trained model hides damage."""

from collections.abc import Callable
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


def gate(quality: Quality, before: Effect | None) -> tuple[GateLine, ...]:
    """`before`: main KV in FP4 on the weights before the last part, or None where nobody measured it."""
    first = quality.drafts.by_position[0] if quality.drafts.by_position else Measured(0.0, 0.0)
    zeroed, random = quality.effect(ZEROED).nats, quality.effect(RANDOM_CHOICE).nats
    xz, bits = quality.xz_bits_per_byte, quality.bits_per_byte
    low, high = ACCEPTED
    return (
        _line("held-out bits per byte", bits, f"below {BITS_PER_BYTE}", lambda x: x < BITS_PER_BYTE),
        _line("the same against xz", bits, f"below xz on the same bytes, {xz:.3f}", lambda x: x < xz),
        _line("compressed KV zeroed, nat", zeroed, f"≥ {ZEROED_NATS}", lambda x: x >= ZEROED_NATS),
        *_resolved(before),
        _line("indexer's recall", quality.recall, f"≥ {RECALL}", lambda x: x >= RECALL),
        _line(
            "random choice of groups, nat", random, f"costs more than {ERRORS:g} standard errors",
            lambda x: x > ERRORS * random.error,
        ),
        _line("first drafts accepted", first, f"{low} to {high}", lambda x: low <= x <= high),
    )  # fmt: skip


def _line(name: str, found: Measured, wanted: str, met: Callable[[float], bool]) -> GateLine:
    return GateLine(name, found.value, found.error, wanted, met(found.value))


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
