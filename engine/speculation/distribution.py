"""The distribution that a request samples from, as the verdicts on drafts take it.

Shapes: V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.sampling.candidates import Logits, draw, probabilities

__all__ = ["LogitRows", "Logits", "Probabilities", "draw", "probabilities"]

LogitRows = Sequence[Logits] | NDArray[np.float32]  # of successive tokens
Probabilities = NDArray[np.float64]  # [V], sums to 1
