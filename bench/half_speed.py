"""The pace at which a decode worker runs at half its speed, measured on single requests.

A worker is slowed by pauses between its steps. A step after a pause is itself slower than one of a row of
them (cores that rest take a while to come back), so a pace of 2.0 gives less than half the speed. How much
less depends on the machine.
"""

from dataclasses import dataclass
from statistics import median

import httpx

from bench.model_calls import call
from bench.team_replays import ReplayStack

HALF = 2.0
ROLE = "decode"
_TOKENS, _REPEATS = 32, 2
_PROMPT = "Tell a long story about a lighthouse."


@dataclass(frozen=True, slots=True)
class HalfSpeed:
    """The pace, and the milliseconds a token that it was found by."""

    pace: float
    full_ms: float  # a token, at full speed
    paced_ms: float  # a token, at a pace of 2.0


def pace_for_half(full_ms: float, paced_ms: float) -> float:
    """Steps are stretched in proportion: paced_ms is a step after a pause, twice."""
    return max(HALF * full_ms / (paced_ms / HALF), 1.0)


async def find_half_speed(stack: ReplayStack) -> HalfSpeed:
    """Measures, by turns. Leaves the worker at full speed."""
    found: dict[float, list[float]] = {1.0: [], HALF: []}
    async with httpx.AsyncClient(base_url=stack.url, timeout=300.0) as http:
        try:
            for _ in range(_REPEATS):
                for pace, times in found.items():
                    await stack.set_pace(ROLE, pace)
                    made = await call(http, _PROMPT, _TOKENS)
                    times.append(made.decode_ms / made.completion_tokens)
        finally:
            await stack.set_pace(ROLE, 1.0)
    full_ms, paced_ms = median(found[1.0]), median(found[HALF])
    return HalfSpeed(pace_for_half(full_ms, paced_ms), full_ms, paced_ms)
