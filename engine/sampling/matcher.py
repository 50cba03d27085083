"""Where one sequence stands in its grammar. Shapes: V vocabulary."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from engine.errors import GrammarStuck
from engine.sampling.adjustments import Allowed
from engine.sampling.watch import TooSlow, Watch
from engine.shortage import is_out_of_memory
from protocol.sampling import Structure

# Of the processor: every other request waits meanwhile. A usual grammar takes 0.1 ms a token.
_MOST_S = 5.0  # of one output
_MOST_CALL_S = 0.5  # of one token


class GrammarMatcher:
    """Follows the tokens of one sequence, and knows nothing else: whoever has lost it, by preemption or a
    hand-off, makes another one and has it follow the tokens so far.
    """

    def __init__(
        self,
        grammar: Any,
        structure: Structure,
        vocabulary: int,
        ends: Collection[int],
        *,
        watch: Watch,
        condemn: Callable[[str], object],
    ) -> None:
        """`grammar`: xgrammar's compiled one, of that structure. `condemn` is told why nobody else should
        follow it."""
        import xgrammar  # pyright: ignore[reportMissingTypeStubs] - takes half a second, most requests need none

        self._matcher: Any = xgrammar.GrammarMatcher(grammar)
        self._bits: Any = xgrammar.allocate_token_bitmask(1, vocabulary)
        self._vocabulary = vocabulary
        self._field, self._begins_after = structure.field, structure.begins_after
        self._free = np.ones(vocabulary, np.bool_)
        self._free[list(ends)] = False  # an output that ended in its reasoning would lack the structure
        self._begun = self._begins_after < 0
        self._watch, self._condemn = watch, condemn
        self._spent_s = 0.0
        self.num_followed = 0

    def follow(self, token_ids: Sequence[int]) -> None:
        """The next tokens of the output. Raises GrammarStuck where the grammar allows one of them not."""
        for token in token_ids:
            self._follow(token)
            self.num_followed += 1

    def allowed(self) -> Allowed | None:
        """[V] of what may come next; None: everything. Raises GrammarStuck."""
        if not self._begun:
            return self._free
        if self.has_ended:
            raise self._stuck("the output has ended already")
        if not self._timed(lambda: self._matcher.fill_next_token_bitmask(self._bits)):
            return None
        mask = np.unpackbits(self._bits.numpy().view(np.uint8), bitorder="little")[: self._vocabulary]
        allowed = mask.view(np.bool_)
        if not allowed.any():
            raise self._stuck("the output can neither go on nor end: no token of the vocabulary is allowed")
        return allowed

    @property
    def has_ended(self) -> bool:
        """Whether the structure is whole, and the end of the output behind it."""
        return self._begun and bool(self._matcher.is_terminated())

    def _timed(self, work: Callable[[], bool]) -> bool:
        """What the grammar says. Raises GrammarStuck where it has taken too long by now, or fails, Overloaded
        where there is no thread for it, and what a lack of memory raises."""
        try:
            answer, spent_s = self._watch.run(work, _MOST_CALL_S)
        except TooSlow as error:
            cause = f"its grammar takes too long to follow: {error}"
            self._condemn(cause)
            raise self._stuck(cause) from error
        except RuntimeError as error:
            if is_out_of_memory(error):  # of which the grammar, and who has sent it, know nothing
                raise
            raise self._stuck(f"its grammar cannot be followed: {error}") from error
        self._spent_s += spent_s
        if self._spent_s > _MOST_S:
            raise self._stuck(f"its grammar has taken more than {_MOST_S:g} s to follow: use a simpler one")
        return answer

    def _stuck(self, cause: str) -> GrammarStuck:
        return GrammarStuck(f"{self._field}: {cause}", parameter=self._field)

    def _follow(self, token: int) -> None:
        if self._begun:
            if self.has_ended:
                raise self._stuck(f"the output has ended before its token {self.num_followed}")
            if not self._timed(lambda: self._matcher.accept_token(token)):
                raise self._stuck(f"the grammar does not allow token {token}, number {self.num_followed}")
        elif token == self._begins_after:
            self._begun = True
