"""Threads that did not come up. Whoever has waited for one tells, and for some seconds nobody waits as long
for the next: what has to be done all the same is not to take five seconds each time."""

import time

from protocol.threads import NoThread, TimelyThread

_SHORT_S = 10.0
_PATIENCE_S = 0.25  # a machine under load takes milliseconds
_LOOK_S = 0.005


class Shortage:
    """Whether a thread was missing just now. Thread-safe."""

    def __init__(self) -> None:
        self._until_s = 0.0

    def tell(self) -> None:
        """One did not come up in time."""
        self._until_s = time.monotonic() + _SHORT_S

    def relieve(self) -> None:
        """One came up."""
        self._until_s = 0.0

    @property
    def is_on(self) -> bool:
        return time.monotonic() < self._until_s

    def has_lost(self, thread: TimelyThread, begun_s: float) -> bool:
        """Whether it is to be given up, which was begun at that time."""
        is_late = self.is_on and time.monotonic() >= begun_s + _PATIENCE_S
        return thread.is_lost or (is_late and not thread.has_begun)

    def start(self, thread: TimelyThread) -> None:
        """As `TimelyThread.start`, and no longer than a moment while this is on."""
        if not self.is_on:
            self._start_in_time(thread)
            return
        begun_s = time.monotonic()
        thread.begin()
        try:
            while not thread.has_begun and not self.has_lost(thread, begun_s):
                time.sleep(_LOOK_S)
        except BaseException:
            thread.take_back()
            raise
        if thread.take_back() is not None:
            raise NoThread("it was not up at once, as the last one was not")
        self.relieve()

    def _start_in_time(self, thread: TimelyThread) -> None:
        begun_s = time.monotonic()
        try:
            thread.start()
        except NoThread:
            if time.monotonic() - begun_s >= _PATIENCE_S:
                self.tell()
            raise


shortage = Shortage()
"""Of this process."""
