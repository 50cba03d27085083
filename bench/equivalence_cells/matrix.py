"""Runs the cells of a subject and compares what they answer with the plain engine's answers."""

from dataclasses import asdict, dataclass
from typing import Any

from bench.equivalence_cells.paths import CELLS, Cell
from bench.equivalence_cells.processes import PROCESS_CELLS
from bench.equivalence_cells.subject import Subject

ALL_CELLS: tuple[Cell, ...] = (*CELLS, *PROCESS_CELLS)


@dataclass(frozen=True, slots=True)
class Verdict:
    """`equal` of `answers` have the same ids; `same_bits` the same probabilities too, to the bit.

    Green: all ids are equal, no bit differs, and the counters prove the path.
    """

    cell: str
    matrix: str
    answers: int
    equal: int
    same_bits: int
    proof: dict[str, int]
    proved: bool
    error: str = ""

    @property
    def green(self) -> bool:
        return self.answers > 0 and self.equal == self.same_bits == self.answers and self.proved

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "green": self.green}


def judge(cell: Cell, subject: Subject) -> Verdict:
    """One cell. An engine that fails on the way makes it red, and says how."""
    try:
        found = cell.run(subject)
    except Exception as error:
        return Verdict(
            cell.name, subject.matrix, 0, 0, 0, {}, proved=False, error=f"{type(error).__name__}: {error}"
        )
    expected = found.expected or subject.plain()
    pairs = [(answer, expected[name]) for name, answer in found.answers.items()]
    equal = [one.token_ids == other.token_ids for one, other in pairs]
    same = [one.logprobs == other.logprobs for one, other in pairs]
    return Verdict(cell.name, subject.matrix, len(pairs), sum(equal), sum(same), found.proof, found.proved)


def cell_named(name: str) -> Cell:
    return next(cell for cell in ALL_CELLS if cell.name == name)
