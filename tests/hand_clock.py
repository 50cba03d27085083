"""Time that a test has in its hand."""


class HandClock:
    """A Clock that stands until it is told otherwise."""

    def __init__(self, now: int = 10**6) -> None:
        self.now = now  # nanoseconds

    def now_ns(self) -> int:
        return self.now
