"""How long a step takes by its size, from measurements (section 8.5, point 1). Pure."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

from engine.errors import InvalidRequest

LEAST_MS = 1e-6  # no step costs nothing


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Milliseconds that never fall with the size.

    Up to `step_limit`, a measured size or 0, a step runs in the next measured size, as captured graphs do;
    beyond it the curve is straight between measurements, and goes on behind the last with the last slope.
    """

    sizes: tuple[int, ...]  # ascending
    times_ms: tuple[float, ...]
    step_limit: int = 0

    @classmethod
    def measured(cls, runs_ms: Mapping[int, Sequence[float]], step_limit: int = 0) -> "CostCurve":
        """The median of each size's runs. Raises InvalidRequest: a size without runs, or no size."""
        sizes = tuple(sorted(runs_ms))
        if not sizes or not all(runs_ms.values()):
            raise InvalidRequest(
                f"runs_ms has runs of {sum(map(bool, runs_ms.values()))} of {len(sizes)} sizes, expected one"
                " or more of each of one size or more",
                parameter="runs_ms",
            )
        captured = max((size for size in sizes if size <= step_limit), default=0)
        medians = (max(median(runs_ms[size]), LEAST_MS) for size in sizes)
        return cls(sizes, tuple(accumulate(medians, max)), captured)

    def ms(self, size: int) -> float:
        """Of a step of that size."""
        after = bisect_left(self.sizes, size)
        if after < len(self.sizes) and (size <= self.step_limit or self.sizes[after] == size or after == 0):
            return self.times_ms[after]
        if len(self.sizes) == 1:
            return self.times_ms[0]
        after = min(after, len(self.sizes) - 1)
        (x0, x1), (y0, y1) = self.sizes[after - 1 : after + 1], self.times_ms[after - 1 : after + 1]
        return y0 + (y1 - y0) * (size - x0) / (x1 - x0)
