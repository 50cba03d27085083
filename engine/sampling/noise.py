"""Seeded noise: a number in [0, 1) for each use, from a counter-based generator without state.

Every number is used once. A draft that nobody has looked at is drawn anew behind the next anchor, with other
noise: else what its confidence has decided meanwhile would lean on the very token that is drawn again
(fact sheet, section 8.5.5).
"""

from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """What a number decides."""

    CHOOSE = 0  # a token, without drafts
    DRAFT = 1
    ACCEPT = 2
    RESAMPLE = 3


def uniform(seed: int, index: int, purpose: Purpose, anchor: int = 0) -> float:
    """By the token's index among the generated ones; for drafts also the index right behind their anchor."""
    counter = np.array([index, purpose, anchor, 0], dtype=np.uint64)
    generator = np.random.Philox(key=seed & (2**64 - 1), counter=counter)
    return float(np.random.Generator(generator).random())
