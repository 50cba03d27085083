"""Scores from counts: unbiased pass@k, with both denominators."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

from pydantic import BaseModel, ConfigDict

from protocol.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Tally:
    """Attempts at one problem: `passed <= scored <= planned`. The unscored failed for reasons of ours."""

    planned: int
    scored: int
    passed: int

    def __post_init__(self) -> None:
        if not 0 <= self.passed <= self.scored <= self.planned:
            raise InvalidInput(f"tally: expected 0 <= passed <= scored <= planned, got {self}")


class PassRates(BaseModel):
    """Scores over one denominator."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    attempts: int  # in the denominator, all problems together
    passed: int
    pass_at: dict[int, float | None]  # k -> mean over the problems that have k attempts; None where none has
    problems_at: dict[int, int]  # k -> number of problems in that mean


def pass_at_k(attempts: int, passed: int, k: int) -> float:
    """The chance that at least one of k attempts drawn without replacement has passed.

    `1 - C(n-c, k) / C(n, k)` (Chen et al., 2021), in whole numbers, so exact to the last place. Raises
    `InvalidInput` unless `1 <= k <= attempts` and `0 <= passed <= attempts`.
    """
    if not 1 <= k <= attempts:
        raise InvalidInput(f"k: {k} is outside 1..{attempts}, the number of attempts")
    if not 0 <= passed <= attempts:
        raise InvalidInput(f"passed: {passed} is outside 0..{attempts}, the number of attempts")
    return 1 - comb(attempts - passed, k) / comb(attempts, k)


def rates_of_planned(tallies: Sequence[Tally], ks: Sequence[int]) -> PassRates:
    """Every planned attempt counts; one without a score counts as not passed. The cautious figure."""
    return _rates([(tally.planned, tally.passed) for tally in tallies], ks)


def rates_of_scored(tallies: Sequence[Tally], ks: Sequence[int]) -> PassRates:
    """Only scored attempts count. Problems may have different numbers of them."""
    return _rates([(tally.scored, tally.passed) for tally in tallies], ks)


def _rates(counts: Sequence[tuple[int, int]], ks: Sequence[int]) -> PassRates:
    pass_at: dict[int, float | None] = {}
    problems_at: dict[int, int] = {}
    for k in sorted(set(ks)):
        values = [pass_at_k(attempts, passed, k) for attempts, passed in counts if attempts >= k]
        pass_at[k] = sum(values) / len(values) if values else None
        problems_at[k] = len(values)
    return PassRates(
        attempts=sum(attempts for attempts, _ in counts),
        passed=sum(passed for _, passed in counts),
        pass_at=pass_at,
        problems_at=problems_at,
    )
