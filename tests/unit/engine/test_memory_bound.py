"""How many rows a step tries at once, where memory has not sufficed for all."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from engine_runs import prompt, small_engine
from torch import Tensor

from engine import Engine, Request
from engine.forward import Forward
from engine.model.base import ChunkRows
from engine.model.stages import StageInterrupted
from engine.scheduler.scheduler import Chunk


class Room:
    """An engine's state that has memory for so many rows, and what was tried on it."""

    def __init__(self, engine: Engine, patch: pytest.MonkeyPatch, rows: int) -> None:
        self._run, self._rows, self._tried = engine.state.run, rows, list[int]()
        self.interrupted_at = -1  # this try of a step
        patch.setattr(engine.state, "run", self.run)

    def run(self, chunks: Sequence[ChunkRows]) -> Tensor:
        self._tried.append(sum(len(chunk.token_ids) for chunk in chunks))
        if len(self._tried) == self.interrupted_at:
            raise StageInterrupted
        if self._tried[-1] > self._rows:
            raise MemoryError
        return self._run(chunks)

    def tries(self, forward: Forward, chunks: list[Chunk]) -> list[int]:
        self._tried.clear()
        forward.run(chunks)
        return list(self._tried)


@pytest.fixture
def engine(tiny_model: Path, cpu_library: Path) -> Engine:
    """Four sequences run, which have blocks for all of their tokens."""
    engine = small_engine(tiny_model, token_budget=4 * 70)
    for number in range(4):
        engine.add(Request(str(number), prompt(70, number)))
    engine.step()
    return engine


def chunks_of(engine: Engine, *counts: int) -> list[Chunk]:
    return [Chunk(s, count) for s, count in zip(engine._scheduler.running, counts, strict=False)]


def test_small_steps_do_not_make_a_bound_be_forgotten(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, forward = Room(engine, monkeypatch, 4), engine._forward
    for sequence in engine._scheduler.running:
        sequence.num_computed = 0
    assert room.tries(forward, chunks_of(engine, 16)) == [16, 8, 4]
    assert room.tries(forward, chunks_of(engine, 16)) == [4]
    for _ in range(3):
        assert room.tries(forward, chunks_of(engine, 1)) == [1]
        assert room.tries(forward, chunks_of(engine, 3, 2)) == [5, 3, 2]
        assert room.tries(forward, chunks_of(engine, 2)) == [2]
        assert room.tries(forward, chunks_of(engine, 3, 2)) == [3, 2]
    assert room.tries(forward, chunks_of(engine, 16)) == [6, 3]


def test_an_interrupted_step_has_not_shown_that_more_fits(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, forward = Room(engine, monkeypatch, 4), engine._forward
    for sequence in engine._scheduler.running:
        sequence.num_computed = 0
    assert room.tries(forward, chunks_of(engine, 4, 4, 4, 4)) == [16, 8, 4, 4, 8, 4, 4]
    room.interrupted_at = 2
    assert room.tries(forward, chunks_of(engine, 4, 4, 4, 4)) == [4, 4]
    room.interrupted_at = -1
    assert room.tries(forward, chunks_of(engine, 4, 4, 4, 4)) == [4, 4, 4, 4]
    assert room.tries(forward, chunks_of(engine, 4, 4, 4, 4)) == [8, 4, 4, 8, 4, 4]
