"""The table of system calls in calls.txt: their numbers, and what becomes of each. Pure."""

import errno
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Literal

from sandbox.errors import UnsupportedError

Machine = Literal["x86_64", "aarch64"]
MACHINES: tuple[Machine, ...] = ("x86_64", "aarch64")
Numbers = tuple[int | None, int | None]  # on each of MACHINES; None where it is not there
ALLOW: Final = -1
_TABLE = Path(__file__).with_name("calls.txt")
_ARGUMENTS = "arguments"
_VERDICTS: dict[str, int] = {"allow": ALLOW, "nothing": 0, "EPERM": errno.EPERM, "ENOSYS": errno.ENOSYS}


@dataclass(frozen=True, slots=True)
class Calls:
    """`verdicts`: ALLOW, or the errno that a call fails with; 0: it succeeds and does nothing. Calls of
    `by_arguments` have none of their own."""

    numbers: dict[str, Numbers]
    verdicts: dict[str, int]
    by_arguments: frozenset[str]


def this_machine() -> Machine:
    """UnsupportedError where the table has no numbers for this processor."""
    for known in MACHINES:
        if platform.machine() == known:
            return known
    raise UnsupportedError(
        f"no table of system calls for {platform.machine()}", hint=f"use {' or '.join(MACHINES)}"
    )


@cache
def known_calls() -> Calls:
    """The table, read once."""
    return parse(_TABLE.read_text())


def parse(text: str) -> Calls:
    """Sections in brackets, `name:number:number` by spaces, comments from # on. ValueError for what is
    none of these, KeyError for a section that nobody knows."""
    numbers: dict[str, Numbers] = {}
    verdicts: dict[str, int] = {}
    by_arguments: set[str] = set()
    section = ""
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if words and words[0].startswith("["):
            section, words = words[0].strip("[]"), words[1:]
        for word in words:
            name, *places = word.split(":")
            if name in numbers or len(places) != len(MACHINES):
                raise ValueError(f"{word!r} in [{section}] is there twice, or not name:number:number")
            numbers[name] = (_number(places[0]), _number(places[1]))
            if section == _ARGUMENTS:
                by_arguments.add(name)
            else:
                verdicts[name] = _VERDICTS[section]
    return Calls(numbers, verdicts, frozenset(by_arguments))


def _number(text: str) -> int | None:
    return None if text == "-" else int(text)


NUMBERS: dict[str, Numbers] = known_calls().numbers
