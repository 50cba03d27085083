"""Which rows of a sequence run, and what is held of it: numbers for those who schedule and need no model."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of a sequence's rows, by absolute position. Properties of the request, however its rows are chunked."""

    start: int = 0  # the first row that runs
    write_from: int = 0  # persistent entries below are known, and stay as they are
    window_from: int = 0  # windows reach no further back
    decoder_from: int = 0  # rows below run the encoder alone


@dataclass(frozen=True, slots=True)
class Held:
    """What a state holds of one sequence: its first `num_positions`."""

    slot: int
    blocks: Sequence[int]
    num_positions: int
    bounds: Bounds


@dataclass(frozen=True, slots=True)
class ResumeRules:
    """What a model makes of a cached prefix, whose blocks hold persistent entries alone.

    With windows a row needs more than the blocks: its slot's windows at the place where it goes on, which are
    kept apart. Where they are gone and `replay` is on, the last window of the prefix runs again instead, and
    entries behind it are not those of a whole pass. `decoder`: decoder layers see the last window of a
    prompt alone, and their own windows are no part of what is kept.
    """

    window: int = 0  # positions that a row reaches back over; 0: the blocks are all
    replay: bool = False
    decoder: bool = False

    def decoder_from(self, num_prompt: int) -> int:
        return max(num_prompt - self.window, 0) if self.decoder else 0

    def exact_until(self, num_prompt: int) -> int:
        """The last position at which kept windows serve a prompt: decoder layers start there themselves."""
        return self.decoder_from(num_prompt) if self.decoder else num_prompt
