"""How many positions a cache block has. Imports no torch."""

import math
from collections.abc import Iterable

from engine.errors import InvalidRequest

_STEP = 16  # vLLM's default


def block_size(wanted: int | None, ratios: Iterable[int]) -> int:
    """As wanted, else the least multiple of 16 in which entries of these many positions are whole.

    Raises InvalidRequest: wanted is no multiple of the ratios.
    """
    known = sorted(set(ratios))
    if wanted is None:
        return math.lcm(_STEP, *known)
    if any(wanted % ratio for ratio in known):
        raise InvalidRequest(
            f"block_tokens is {wanted}, expected a multiple of the ratios {known}",
            parameter="block_tokens",
            hint=f"leave it out to take {math.lcm(_STEP, *known)}",
        )
    return wanted
