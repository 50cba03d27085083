"""What can come of an attempt, and what follows from it."""

from dataclasses import dataclass
from typing import Literal, get_args

Verdict = Literal[
    "passed",
    "failed",  # the program ran and was wrong: an assertion, an exception, an early exit
    "timeout",  # the program did not end in its time
    "oom",  # the program asked for more memory than its sandbox has
    "no_code",  # the reply holds no program
    "syntax",  # the reply's program is not Python
    "infrastructure",  # endpoint or sandbox failed: says nothing about the model
    "refused",  # the endpoint refused the request as wrong: the settings are, not the model
    "unverified",  # the run was ended before its tests could run
]

VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


@dataclass(frozen=True, slots=True)
class Consequence:
    """Three bits that must not be confused: only what the model did is scored, and trained on."""

    retry: bool  # running the same attempt again can give another verdict
    scored: bool  # counts among the scored attempts
    reward_valid: bool  # may be used as a reward


_OF_THE_MODEL = Consequence(retry=False, scored=True, reward_valid=True)
_OF_THE_PLATFORM = Consequence(retry=True, scored=False, reward_valid=False)
_OF_THE_CALLER = Consequence(retry=False, scored=False, reward_valid=False)


def consequence(verdict: Verdict) -> Consequence:
    """What follows from a verdict."""
    match verdict:
        case "infrastructure" | "unverified":
            return _OF_THE_PLATFORM
        case "refused":
            return _OF_THE_CALLER
        case _:
            return _OF_THE_MODEL
