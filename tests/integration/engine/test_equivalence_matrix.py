"""The equivalence matrix in small: eight short prompts on nano, two on smollm2, every path, ten faults."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.equivalence import subject_of
from bench.equivalence_cells.detours import DETOURS, try_detours
from bench.equivalence_cells.faults import FAULTS, try_faults
from bench.equivalence_cells.matrix import ALL_CELLS, judge
from bench.equivalence_cells.paths import Cell
from bench.equivalence_cells.prompts import SHORT
from bench.equivalence_cells.subject import Proof, Subject

LENGTHS = {"nano": SHORT, "nano, replay off": SHORT[-3:], "smollm2": SHORT[2:4]}


@pytest.fixture(scope="module", params=LENGTHS)
def subject(request: pytest.FixtureRequest, cpu_library: Path) -> Iterator[Subject]:
    name, _, off = request.param.partition(", ")
    found = subject_of(name, LENGTHS[request.param], replay=not off)
    yield found
    found.close()
    found.model.close()


@pytest.mark.parametrize("cell", ALL_CELLS, ids=lambda cell: cell.name)
def test_every_path_gives_the_same_tokens_and_proves_itself(subject: Subject, cell: Cell) -> None:
    if not cell.applies(subject):
        pytest.skip("not a path of this model, or of prompts so short")
    verdict = judge(cell, subject)
    assert verdict.green, verdict


def test_every_fault_turns_its_cell_red(cpu_library: Path) -> None:
    tried = list(try_faults())
    assert len(tried) == len(FAULTS) == 10
    assert [fault for fault in tried if not fault.red] == []


def test_a_cell_whose_path_is_not_taken_notices_though_its_answers_are_right(cpu_library: Path) -> None:
    seen = list(try_detours())
    assert [found for found in seen if not (found.answers_right and found.noticed)] == []
    assert {found.cell for found in seen} == {cell.name for cell in ALL_CELLS}
    assert len(seen) == sum(len(detour.cells) for detour in DETOURS)


@pytest.mark.parametrize(
    ("taken", "absent", "holds"),
    [
        ({}, {}, False),
        ({"hits": (0, 0)}, {}, False),
        ({"hits": (1, 0)}, {}, False),
        ({"hits": (0, 1)}, {}, False),
        ({"hits": (1, 1), "loads": (0, 1)}, {}, False),
        ({"hits": (1, 1)}, {"corrupt": 1}, False),
        ({"hits": (2, 1)}, {"corrupt": 0}, True),
    ],
)
def test_no_proof_holds_with_a_counter_at_zero(
    taken: dict[str, tuple[int, int]], absent: dict[str, int], holds: bool
) -> None:
    assert Proof(taken, absent).holds == holds
