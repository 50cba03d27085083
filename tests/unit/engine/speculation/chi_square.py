"""Whether counts come from a distribution: Pearson's statistic, and its bound at a significance of 0.001."""

from collections import Counter
from collections.abc import Hashable, Mapping


def statistic(counts: Counter, expected: Mapping[Hashable, float]) -> float:
    """Of the distribution's cells; counts outside of them are an error."""
    assert counts.keys() <= {cell for cell, p in expected.items() if p > 0}, "what can never be has been"
    total = sum(counts.values())
    return sum((counts[cell] - total * p) ** 2 / (total * p) for cell, p in expected.items() if p > 0)


def bound(cells: int) -> float:
    """Wilson and Hilferty's approximation."""
    df = cells - 1
    return df * (1 - 2 / (9 * df) + 3.0902 * (2 / (9 * df)) ** 0.5) ** 3


def agrees(counts: Counter, expected: Mapping[Hashable, float]) -> bool:
    return statistic(counts, expected) < bound(sum(p > 0 for p in expected.values()))
