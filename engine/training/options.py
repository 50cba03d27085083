"""Values of the training commands' options, refused by the option's name."""

import argparse
import math
from collections.abc import Callable


def at_least(least: int) -> Callable[[str], int]:
    """For argparse: a whole number from `least` on."""

    def number(text: str) -> int:
        if not text.removeprefix("-").isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}, expected a whole number from {least} on")
        return int(text)

    return number


def duration(text: str) -> float:
    """For argparse: a length of time, 0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a number from 0 on")
    return value


def count_of(text: str) -> int | None:
    """For argparse: a number of windows, or `all`."""
    return None if text == "all" else at_least(1)(text)
