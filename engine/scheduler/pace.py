"""When a request that was refused may come again."""

import math

_MOST_S = 600
_SMOOTHING = 0.2


class Pace:
    """About when, at the pace at which requests have ended of late, the next one's turn would come."""

    def __init__(self) -> None:
        self._last_ns = 0
        self._between_s = 1.0  # two requests that end
        self._refused = 0  # since one has ended: each of them waits for another place

    def finished(self, now_ns: int) -> None:
        if self._last_ns:
            self._between_s += _SMOOTHING * ((now_ns - self._last_ns) / 1e9 - self._between_s)
        self._last_ns, self._refused = now_ns, 0

    def refused(self) -> float:
        """Seconds, a whole number of at least one."""
        self._refused += 1
        return float(min(max(math.ceil(self._between_s * self._refused), 1), _MOST_S))
