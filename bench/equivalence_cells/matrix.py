"""Runs the cells of a subject and compares what they answer with what the model says (`reference`)."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

from bench.equivalence_cells.paths import CELLS, Cell
from bench.equivalence_cells.processes import PROCESS_CELLS
from bench.equivalence_cells.subject import Subject

ALL_CELLS: tuple[Cell, ...] = (*CELLS, *PROCESS_CELLS)

Change = Callable[[], AbstractContextManager[object]]
"""Makes the engine another one for as long as it is entered."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`equal` of `answers` have the same ids; `same_bits` the same probabilities too, to the bit.

    `answers` are those that were due, of which some may be `missing`, and those that nobody asked for.
    `taken` are the engine's counters of the path, `least` what each must reach, `absent` those that must be
    0. Green: nothing is missing, all ids are equal, no bit differs, and the counters prove the path.
    """

    cell: str
    matrix: str
    answers: int
    missing: int
    equal: int
    same_bits: int
    taken: dict[str, int]
    least: dict[str, int]
    absent: dict[str, int]
    proved: bool
    error: str = ""

    @property
    def right(self) -> bool:
        return self.answers > 0 and self.equal == self.same_bits == self.answers

    @property
    def differing(self) -> int:
        """Answers that came, and are not right."""
        return self.answers - self.missing - self.same_bits

    @property
    def green(self) -> bool:
        return self.right and self.proved

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "green": self.green}


def judge(cell: Cell, subject: Subject, change: Change = nullcontext) -> Verdict:
    """One cell. An engine that fails on the way makes it red, and says how.

    `change`: of the engine while it answers, and no longer when its answers are compared.
    """
    try:
        with change():
            found = cell.run(subject)
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        return Verdict(cell.name, subject.matrix, 0, 0, 0, 0, {}, {}, {}, proved=False, error=told)
    by = found.judge or subject
    due = {case.name for case in subject.cases} if found.due is None else set(found.due)
    missing = len(due - found.answers.keys())
    compared = [
        by.compare(name, answer, answer.resumed if found.may_resume else ())
        if name in due
        else (False, False)
        for name, answer in found.answers.items()
    ]
    equal, same = sum(ids for ids, _ in compared), sum(bits for _, bits in compared)
    proof = found.proof
    taken = {name: count for name, (count, _) in proof.taken.items()}
    least = {name: count for name, (_, count) in proof.taken.items()}
    return Verdict(
        cell.name, subject.matrix, len(compared) + missing, missing, equal, same,
        taken, least, dict(proof.absent), proof.holds,
    )  # fmt: skip


def cell_named(name: str) -> Cell:
    return next(cell for cell in ALL_CELLS if cell.name == name)
