"""The rows of a step through the model: at once, or where memory does not suffice for that, part by part.

A row's bits depend on its sequence alone, so parts give what the whole would. A pass that fails leaves what
its sequences read as it was (`State.run`), and its rows run again.
"""

import gc
import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from torch import Tensor

from engine.chunk_rows import rows_of
from engine.model.stages import StageInterrupted
from engine.request import Sequence
from engine.scheduler.scheduler import Chunk
from engine.shortage import is_out_of_memory
from engine.weights import Weights
from protocol.stages import StageNs

_log = logging.getLogger(__name__)
_Part = list[Chunk]


@dataclass(frozen=True, slots=True)
class Ran:
    """`chunks`: those that ran, in order, some of them shorter than planned. `logits` [R, V] of each part, of
    the rows that want them. `starved`: sequences of which not one row fits into memory."""

    chunks: list[Chunk] = field(default_factory=list[Chunk])
    logits: list[Tensor] = field(default_factory=list[Tensor])
    starved: list[Sequence] = field(default_factory=list[Sequence])


class Forward:
    """Owned by the engine's thread, but for `stepping`."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self.steps = self.rows = 0
        self.stepping: frozenset[str] = frozenset()  # requests of the pass that runs
        self._most_rows = 0  # of a pass, where the last steps had no memory for more; 0: no bound

    def run(self, chunks: list[Chunk]) -> Ran:
        """A row that is alone has two tries. Raises StageInterrupted where nothing has run."""
        ran, largest, short, whole = Ran(), 0, False, True
        tried: _Part = []
        parts = deque(_cut(chunks, self._most_rows))
        while parts:
            part = parts.popleft()
            try:
                logits = self._pass(part)
            except StageInterrupted:
                if not ran.chunks:
                    raise
                whole = False
                break
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                _log.warning("no memory for %d rows of %d sequences: %s", _num_rows(part), len(part), error)
                short = True
            else:
                ran.chunks.extend(part)
                ran.logits.append(logits)
                largest = max(largest, _num_rows(part))
                continue
            # Behind the error, whose frames hold what the pass has made.
            if smaller := list(_halves(part)):
                parts.extendleft(reversed(smaller))
            elif part is not tried:
                gc.collect()
                parts.appendleft(tried := part)
            else:
                ran.starved.append(part[0].sequence)
        # The next step tries no more than what fitted, and twice as much after each that had so many rows.
        if short:
            self._most_rows = max(largest, 1)
        elif whole and _num_rows(chunks) >= self._most_rows:
            self._most_rows *= 2
        return ran

    def _pass(self, part: _Part) -> Tensor:
        """Logits [R, V] of the rows that want them, in order."""
        state = self._weights.state
        self.stepping = frozenset(chunk.sequence.request.id for chunk in part)
        before = None if state.stages is None else state.stages.spent()
        try:
            logits = state.run([rows_of(chunk) for chunk in part])
        finally:
            self.stepping = frozenset()
            if state.stages is not None and before is not None:
                _charge(part, state.stages.spent().minus(before))
        self.steps, self.rows = self.steps + 1, self.rows + _num_rows(part)
        return logits


def _halves(part: _Part) -> Iterator[_Part]:
    """Of the sequences; of a single one the first half of its rows. Nothing where it is one row."""
    if (half := len(part) // 2) > 0:
        yield part[:half]
        yield part[half:]
    elif part[0].count > 1:
        yield [replace(part[0], count=part[0].count // 2)]


def _cut(chunks: list[Chunk], most: int) -> Iterator[_Part]:
    """Parts of at most so many rows, 0 for all at once; of a longer chunk the first ones, which are its own
    part: the others run in a later step."""
    if most == 0:
        yield chunks
        return
    part: _Part = []
    for chunk in chunks:
        fitting = replace(chunk, count=min(chunk.count, most))
        if part and _num_rows(part) + fitting.count > most:
            yield part
            part = []
        part.append(fitting)
    yield part


def _num_rows(chunks: list[Chunk]) -> int:
    return sum(chunk.count for chunk in chunks)


def _charge(part: _Part, spent: StageNs) -> None:
    """The pass's time to each that was in it."""
    for sequence in (chunk.sequence for chunk in part):
        before = sequence.stages.spent or StageNs()
        sequence.stages = replace(sequence.stages, spent=before.plus(spent))
