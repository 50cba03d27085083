"""How a command ends when it is told to: SIGTERM, and the SIGHUP of a terminal that goes, take the way of
Ctrl-C; the exit code says which it was."""

import os
import signal
from collections.abc import Callable
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LAST_S = 120.0  # of the interpreter's end; what it has started takes seconds to end, and does without it too


class Ending:
    """What this process does on Ctrl-C, SIGTERM and SIGHUP. One a process, for its main thread."""

    def __init__(self) -> None:
        self.number = signal.SIGINT  # of the signal that came

    def at_once(self) -> None:
        """End where it stands, without a word: nothing has been started, and an exception could be lost in
        the middle of an import."""
        for number in _SIGNALS:
            _handle(number, _leave)

    def in_order(self, *, is_server: bool = False) -> None:
        """Raise KeyboardInterrupt, or cancel the running event loop's main task, as Ctrl-C does. A server
        ends at once when its terminal goes: it holds the other two back (`cluster.lifeline`)."""
        _handle(signal.SIGINT, signal.default_int_handler)
        _handle(signal.SIGTERM, self._terminate)
        if not is_server:
            _handle(signal.SIGHUP, self._terminate)

    def no_more(self) -> None:
        """From here on all three are ignored: what is left is the interpreter's own end, where an exception
        would be a traceback, and a second Ctrl-C another exit code. One that hangs is ended by the kernel."""
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, _LAST_S)

    @property
    def code(self) -> int:
        """To exit with after a signal."""
        return 128 + self.number

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self.number = signal.Signals(number)
        interrupt = signal.getsignal(signal.SIGINT)  # an event loop that runs has put its own there
        if not callable(interrupt):
            raise KeyboardInterrupt
        interrupt(number, frame)


def _handle(number: signal.Signals, handler: Callable[[int, FrameType | None], object]) -> None:
    if signal.getsignal(number) is not signal.SIG_IGN:  # as of a job in the background
        signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)
