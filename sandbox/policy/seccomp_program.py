"""The table of system calls as instructions of the kernel's filter machine (classic BPF, struct sock_filter
of linux/filter.h). Pure.

A call's number is sought in a tree of comparisons, some seven deep. Where the number alone decides that a
call is allowed the kernel (5.11 and later) notes so when the filter is set, and runs nothing for that call.
"""

import struct
from functools import cache

from sandbox.policy.call_choices import LOW, OTHERWISE, Choice, Verdict, verdict_of
from sandbox.policy.calls import ALLOW, MACHINES, NUMBERS, Machine

_AUDIT: dict[Machine, int] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_FIRST, _NO_CALL = 0x40000000, LOW
_KILL = -2
_ALLOWED, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _AND, _RETURN, _GO = 0x20, 0x54, 0x06, 0x05
_IF_EQUAL, _IF_AT_LEAST = 0x15, 0x35
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_FARTHEST = 255  # steps that a comparison skips

_Step = tuple[int, int, int, int]  # code, steps to skip when true, when false, operand
_Segments = list[tuple[int, Verdict]]  # from this number on, up to the next one's


@cache
def filter_program(machine: Machine) -> bytes:
    """The program, as bubblewrap and crun take it. Calls of other architectures end the process, on x86_64
    those of x32 too. A tracer's "no call" (-1) passes."""
    steps: list[_Step] = [(_LOAD, 0, 0, _ARCHITECTURE_AT), (_IF_EQUAL, 1, 0, _AUDIT[machine])]
    steps += [(_RETURN, 0, 0, _KILL_PROCESS), (_LOAD, 0, 0, _NUMBER_AT), *_tree(_numbers(machine))]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def _numbers(machine: Machine) -> _Segments:
    at = MACHINES.index(machine)
    points: dict[int, Verdict] = {_NO_CALL: ALLOW}
    for name, numbers in NUMBERS.items():
        number = numbers[at]
        if number is not None:
            points[number] = verdict_of(name)
    found = _segments(points, OTHERWISE)
    if machine == "x86_64":
        found.insert(len(found) - 1, (_X32_FIRST, _KILL))
    return found


def _segments(points: dict[int, Verdict], otherwise: Verdict) -> _Segments:
    """All numbers of 32 bits; neighbours that end alike are one."""
    found: _Segments = []
    after = 0
    for value in sorted(points):
        if value > after:
            found.append((after, otherwise))
        found.append((value, points[value]))
        after = value + 1
    if after <= LOW:
        found.append((after, otherwise))
    return [each for i, each in enumerate(found) if i == 0 or each[1] != found[i - 1][1]]


def _tree(segments: _Segments) -> list[_Step]:
    """Halves them until one is left."""
    if len(segments) == 1:
        return _leaf(segments[0][1])
    middle = len(segments) // 2
    return _branch(segments[middle][0], _tree(segments[middle:]), _tree(segments[:middle]))


def _leaf(verdict: Verdict) -> list[_Step]:
    if isinstance(verdict, Choice):
        return _choice(verdict)
    action = {ALLOW: _ALLOWED, _KILL: _KILL_PROCESS}.get(verdict, _ERRNO | verdict)
    return [(_RETURN, 0, 0, action)]


def _choice(choice: Choice) -> list[_Step]:
    """The low half of an argument is the first in memory on both architectures."""
    load: list[_Step] = [(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * choice.argument)]
    if choice.mask != LOW:
        load.append((_AND, 0, 0, choice.mask))
    return [*load, *_tree(_segments(choice.by_value(), choice.otherwise))]


def _branch(first: int, from_it_on: list[_Step], below: list[_Step]) -> list[_Step]:
    """Neither goes on behind its end: all of their ways return."""
    if len(below) <= _FARTHEST:
        return [(_IF_AT_LEAST, len(below), 0, first), *below, *from_it_on]
    return [(_IF_AT_LEAST, 0, 1, first), (_GO, 0, 0, len(below)), *below, *from_it_on]
