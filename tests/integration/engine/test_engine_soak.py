"""The soak of `bench.engine_soak` in small, and with `make soak` all of it: a million requests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from soak_results import keep

from bench import engine_soak
from bench.common import Options
from engine.model.base import Model
from engine.model.registry import load_model


@pytest.fixture
def nano(cpu_library: Path) -> Iterator[Model]:
    model = load_model("nano", threads=1)
    yield model
    model.close()


def test_requests_of_every_fate_leave_no_object_behind(nano: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_soak, "EVERY", 300)
    found = engine_soak.soak(nano, 900)
    first, *_, last = found.memory
    assert set(found.fates) >= set(engine_soak.FATES)
    assert found.engine.statistics().scheduler.preemptions > 0
    assert found.engine.statistics().scheduler.swapped > 0
    assert engine_soak.more_objects(first, last) == {}
    assert not found.engine.has_work


@pytest.mark.soak
@pytest.mark.timeout(7_200)
def test_a_million_requests_leave_memory_flat(cpu_library: Path) -> None:
    found = engine_soak.measure(Options(as_json=True, quick=False))
    keep("engine", found)
    assert found["met"], found
