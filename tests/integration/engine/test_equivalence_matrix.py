"""The equivalence matrix in small: eight short prompts on nano, two on smollm2, every path, ten faults."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.equivalence import subject_of
from bench.equivalence_cells.faults import FAULTS, try_faults
from bench.equivalence_cells.matrix import ALL_CELLS, judge
from bench.equivalence_cells.paths import Cell
from bench.equivalence_cells.prompts import SHORT
from bench.equivalence_cells.subject import Subject

LENGTHS = {"nano": SHORT, "nano, replay off": SHORT[-3:], "smollm2": SHORT[2:4]}


@pytest.fixture(scope="module", params=LENGTHS)
def subject(request: pytest.FixtureRequest, cpu_library: Path) -> Iterator[Subject]:
    name, _, off = request.param.partition(", ")
    found = subject_of(name, LENGTHS[request.param], replay=not off)
    yield found
    found.model.close()


@pytest.mark.parametrize("cell", ALL_CELLS, ids=lambda cell: cell.name)
def test_every_path_gives_the_same_tokens_and_proves_itself(subject: Subject, cell: Cell) -> None:
    if not cell.applies(subject):
        pytest.skip("not a path of this model")
    verdict = judge(cell, subject)
    assert verdict.green, verdict


def test_every_fault_turns_its_cell_red(cpu_library: Path) -> None:
    tried = list(try_faults())
    assert len(tried) == len(FAULTS) == 10
    assert [fault for fault in tried if not fault.red] == []
