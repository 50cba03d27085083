"""Interrupts as a signal handler raises them: at each place where the interpreter would call one."""

import contextlib
import dis
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import sandbox
from sandbox.undisturbed import undisturbed

_BEGINS = ("RESUME", 0)
TRIED = (str(Path(sandbox.__file__).parent), contextlib.__file__)


class Interrupt(BaseException):
    """As a handler raises one."""


class _Places:
    """Raises where this thread would call a handler for the so many-th time: the interpreter looks for
    signals when a function begins, where a loop goes back, and behind each call of what is not Python."""

    def __init__(self, number: int) -> None:
        self.left = number
        self._behind: dict[int, str] = {}  # the last instruction of each frame

    def trace(self, frame: FrameType, event: str, _: object) -> Callable[..., object] | None:
        if event == "call" and self._behind.get(id(frame.f_back)) == "CALL":
            self._behind[id(frame.f_back)] = ""
        if not frame.f_code.co_filename.startswith(TRIED):
            return None
        frame.f_trace_opcodes = True
        now, argument = frame.f_code.co_code[frame.f_lasti : frame.f_lasti + 2]
        if event == "call" and (dis.opname[now], argument) == _BEGINS:  # which is not told as an instruction
            self._come()
        elif event == "opcode":
            then, self._behind[id(frame)] = self._behind.get(id(frame), ""), dis.opname[now]
            if then.startswith(("CALL", "JUMP_BACKWARD")):
                self._come()
        elif event == "return":
            self._behind.pop(id(frame), None)
        return self.trace

    def _come(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise Interrupt


def interrupted_at(number: int, call: Callable[[], object]) -> bool:
    """Calls it, interrupted at the so many-th place. False where it comes to its end before that."""
    before = sys.gettrace()
    sys.settrace(_Places(number).trace)
    try:
        call()
    except Interrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def interrupted_twice(after_s: float, number: int, call: Callable[[], object]) -> bool:
    """Calls what takes longer, interrupted after that time, and again at the so many-th place from there on.
    False where it has not so many."""
    before, second = sys.gettrace(), _Places(number)

    def interrupt(_: int, frame: FrameType | None) -> None:
        sys.settrace(second.trace)
        while frame is not None:  # those that have begun, too
            frame.f_trace, frame = second.trace, frame.f_back
        raise Interrupt

    usual = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        call()
    except Interrupt:
        sys.settrace(before)
        return second.left <= 0
    finally:
        signal.signal(signal.SIGALRM, usual)
    raise AssertionError("it ended before it was interrupted")


def at_each_place(call: Callable[[], object]) -> Iterator[int]:
    """Calls it, interrupted at the first place, then at the second, until it comes to its end."""
    undisturbed(int)  # whose thread is there from now on
    number = 1
    while interrupted_at(number, call):
        yield number
        number += 1
    assert number > 10
