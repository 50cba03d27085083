"""The tokens of one sequence so far, counted as penalties need them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(slots=True)
class Past:
    """Prompt ids without repetition, and how often each other token has been generated.

    A function of the tokens alone: whoever has lost it, by preemption or a hand-off, counts anew.
    """

    prompt_ids: Ids
    counts: dict[int, int] = field(default_factory=dict[int, int])
    num_counted: int = 0  # generated tokens that `counts` knows

    @classmethod
    def of(cls, prompt_ids: Sequence[int], generated: Sequence[int] = ()) -> "Past":
        past = cls(np.unique(np.asarray(prompt_ids, np.int64)))
        past.extend(generated)
        return past

    def extend(self, token_ids: Sequence[int]) -> None:
        """Count newly generated tokens."""
        for token in token_ids:
            self.counts[token] = self.counts.get(token, 0) + 1
        self.num_counted += len(token_ids)

    def generated(self) -> tuple[Ids, NDArray[np.float32]]:
        """Generated ids, each once, and their counts."""
        ids = np.fromiter(self.counts.keys(), np.int64, len(self.counts))
        return ids, np.fromiter(self.counts.values(), np.float32, len(self.counts))


NOTHING = Past(np.zeros(0, np.int64))
"""Of a request that needs no past; never extended."""
