"""Token windows for training and for judging.

B sequences a batch, T tokens a sequence.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of `length` + 1 tokens out of a row of files that belong together: inputs and their targets."""

    tokens: Ids  # all files, one after the other
    length: int

    def batches(self, size: int, epoch: int, rank: int = 0, num_ranks: int = 1) -> Iterator[Ids]:
        """[B, T + 1] windows in an order that `epoch` alone decides; each rank has its own share.

        Windows begin elsewhere in each epoch. What does not fill a batch of all ranks is left out.
        """
        noise = np.random.default_rng(epoch)
        shift = int(noise.integers(self.length))
        starts = np.arange(shift, len(self.tokens) - self.length, self.length)
        noise.shuffle(starts)
        whole = len(starts) // (size * num_ranks)
        for step in range(whole):
            first = (step * num_ranks + rank) * size
            yield self._gather(starts[first : first + size])

    def _gather(self, starts: NDArray[np.int64]) -> Ids:
        return self.tokens[starts[:, None] + np.arange(self.length + 1)]


def pack(files: Sequence[Sequence[int]], length: int) -> Windows:
    """One row of tokens, in the order of the files."""
    tokens = np.fromiter((token for file in files for token in file), np.uint16)
    return Windows(tokens, length)
