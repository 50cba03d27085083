"""The equivalence matrix in small: five short prompts on nano, two on smollm2, every path, ten faults."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from unittest.mock import patch

import pytest

from bench.equivalence import subject_of
from bench.equivalence_cells.detours import DETOURS, try_detours
from bench.equivalence_cells.faults import FAULTS, Fault, try_faults
from bench.equivalence_cells.matrix import ALL_CELLS, cell_named, judge
from bench.equivalence_cells.paths import CELLS, Cell
from bench.equivalence_cells.prompts import SHORT, cases
from bench.equivalence_cells.subject import Proof, Subject
from engine import Engine, Request, load_model
from engine.model.base import Model
from engine.scheduler.scheduler import Scheduler

LENGTHS = {"nano": (*SHORT[::2], SHORT[-1]), "nano, replay off": SHORT[-3:], "smollm2": SHORT[2:4]}


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


def test_a_fault_that_only_raises_is_not_caught(cpu_library: Path) -> None:
    """As one does whose name in the engine is another by now."""

    def broken(*_: object) -> None:
        raise TypeError("takes 3 arguments, and 4 were given")

    def put() -> AbstractContextManager[object]:
        return patch.object(Scheduler, "schedule", broken)

    faults = (Fault("renamed", "host-tier hit", put), Fault("named", "host-tier hit", put, "AssertionError"))
    tried = list(try_faults(faults))
    assert [(fault.green_before, fault.red) for fault in tried] == [(True, False)] * 2
    assert all(fault.error.startswith("TypeError") for fault in tried)


@pytest.fixture(scope="module")
def nano(cpu_library: Path) -> Iterator[Model]:
    model = load_model("nano", threads=1)
    yield model
    model.close()


def four(model: Model, lengths: tuple[int, ...] = (110, 120, 130, 140)) -> Subject:
    return Subject("nano", model, True, cases(model.tokenizer(), lengths), 1, 4 << 20)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_a_cell_that_loses_answers_is_red(nano: Model, cell: Cell) -> None:
    subject = four(nano, (110, 120, 530, 540) if cell.name == "chunks of 512" else (110, 120, 130, 140))
    add, kept = Engine.add, {case.name for case in subject.cases[:2]}

    def lose(engine: Engine, request: Request) -> None:
        if request.id in kept or request.id.startswith("urgent"):
            add(engine, request)

    verdict = judge(cell, subject, lambda: patch.object(Engine, "add", lose))
    assert not verdict.right
    assert verdict.missing >= 2 or verdict.error, verdict


@pytest.mark.parametrize("lengths", [(190, 230), (230, 250), (250, 230), (110, 120, 130, 140)])
def test_a_prefix_that_eviction_leaves_is_judged_too(nano: Model, lengths: tuple[int, ...]) -> None:
    verdict = judge(cell_named("after eviction"), four(nano, lengths))
    assert verdict.green, verdict


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
