"""Whether a decode worker that is told to run at half its speed does so, by single requests.

A pace of 2.0 stretches the engine's steps; what lies between them (sockets, the gateway) stays. So the time a
token is a little less than twice as long, and the what-if, which doubles all of it, foretells a little more.
"""

from dataclasses import dataclass
from statistics import median

import httpx

from bench.model_calls import call
from bench.team_replays import ReplayStack

HALF = 2.0
ROLE = "decode"
_TOKENS, _REPEATS = 32, 3
_PROMPT = "Tell a long story about a lighthouse."


@dataclass(frozen=True, slots=True)
class HalfSpeed:
    """Milliseconds a token: medians."""

    full_ms: float
    half_ms: float
    ratio: float


async def measure_half_speed(stack: ReplayStack) -> HalfSpeed:
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
    full_ms, half_ms = median(found[1.0]), median(found[HALF])
    return HalfSpeed(full_ms, half_ms, half_ms / full_ms)
