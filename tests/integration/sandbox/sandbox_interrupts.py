"""Interrupts as a signal handler raises them: at each place where the interpreter would call one."""

import contextlib
import dis
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import sandbox
from sandbox.undisturbed import undisturbed

TRIED = (str(Path(sandbox.__file__).parent), contextlib.__file__)


class Interrupt(BaseException):
    """As a handler raises one."""


@contextmanager
def interrupted_at(number: int) -> Iterator[None]:
    """Raises where this thread would call a handler for the so many-th time: the interpreter looks for
    signals when a function begins, where a loop goes back, and behind each call of what is not Python."""
    left, before = number, sys.gettrace()
    behind: dict[int, str] = {}  # the last instruction of each frame

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., object] | None:
        nonlocal left
        if event == "call" and behind.get(id(frame.f_back)) == "CALL":
            behind[id(frame.f_back)] = ""
        if not frame.f_code.co_filename.startswith(TRIED):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            now = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            then, behind[id(frame)] = behind.get(id(frame), ""), now
            if now == "RESUME" or then.startswith(("CALL", "JUMP_BACKWARD")):
                left -= 1
                if left == 0:
                    raise Interrupt
        elif event == "return":
            behind.pop(id(frame), None)
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def at_each_place(call: Callable[[], object]) -> Iterator[int]:
    """Calls it, interrupted at the first place, then at the second, until it comes to its end."""
    undisturbed(int)  # whose thread is there from now on
    number, is_through = 0, False
    while not is_through:
        number += 1
        try:
            with interrupted_at(number):
                call()
            is_through = True
        except Interrupt:
            yield number
    assert number > 10
