"""The books tell on a leak of each kind that they name."""

from pathlib import Path

import pytest
from engine_runs import finish, small_engine

from engine import Engine, Request, SamplingParams
from engine.cache.tiers import Tiers
from engine.residence import Residence

NEW = SamplingParams(max_tokens=6, ignore_eos=True)
FIRST, SECOND = tuple(range(10, 50)), tuple(range(60, 100))


@pytest.fixture(autouse=True)
def library(cpu_library: Path) -> None:
    """Engines here run the C operations."""


def swapped_out(model: Path) -> Engine:
    """One request in host memory, one that runs."""
    engine = small_engine(model, tiers={"host_bytes": 8 << 20}, preemption="swap", max_sequences=1)
    engine.add(Request("low", FIRST, NEW, priority=1))
    engine.step()
    engine.add(Request("high", SECOND, NEW))
    engine.step()
    assert engine.statistics().tiers.blocks.reserved_bytes > 0
    engine.check_integrity()
    return engine


def test_room_that_stays_reserved_for_one_that_has_left(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = swapped_out(tiny_model)
    monkeypatch.setattr(Residence, "leave", lambda residence, sequence: None)
    engine.abort("low")
    with pytest.raises(AssertionError, match="room is reserved for low"):
        engine.check_integrity()


def test_room_of_another_size_than_what_it_holds(tiny_model: Path) -> None:
    engine = swapped_out(tiny_model)
    sequence = engine._intake.sequences["low"]
    sequence.incoming = None
    with pytest.raises(AssertionError, match="room is reserved for low"):
        engine.check_integrity()


def test_what_was_loaded_and_stays_pinned_for_nobody(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = {"host_bytes": 8 << 20, "disk_path": str(tmp_path)}
    first = small_engine(tiny_model, tiers=tiers)
    finish(first, [Request("r", FIRST, NEW)])
    first.close()
    engine = small_engine(tiny_model, tiers=tiers)
    try:
        engine._residence.tiers.flush()
        engine.add(Request("r", FIRST, NEW))
        engine.check_integrity()
        monkeypatch.setattr(Tiers, "end", lambda tiers, prefetch: None)
        engine.abort("r")
        with pytest.raises(AssertionError, match="a prefetch, or what it pins, is nobody's"):
            engine.check_integrity()
    finally:
        engine.close()
