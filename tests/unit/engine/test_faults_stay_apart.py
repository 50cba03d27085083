"""A row that is no distribution ends its request alone, and copies for which memory is out end none."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from engine_runs import drain, finish, small_engine
from torch import Tensor

from engine import Engine, Request, SamplingParams
from engine.errors import InvalidLogits, Overloaded
from engine.model.base import ChunkRows
from engine.sampling.candidates import check_logits

NEW = SamplingParams(max_tokens=8, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.0, top_p=0.9, seed=4)
PROMPTS = {name: tuple(range(10 + 50 * number, 40 + 50 * number)) for number, name in enumerate("abc")}
Spoil = Callable[[Tensor], object]


def whole(value: float) -> Spoil:
    return lambda row: row.fill_(value)


def at(place: int, value: float) -> Spoil:
    def spoil(row: Tensor) -> None:
        row[place] = value

    return spoil


@pytest.fixture(autouse=True)
def library(cpu_library: Path) -> None:
    """Engines here run the C operations."""


def spoil_row_of(engine: Engine, prompt: tuple[int, ...], at_step: int, spoil: Spoil) -> None:
    """From that step on, each row of the sequence with that prompt."""
    state, run, slots, steps = engine.state, engine.state.run, set[int](), 0

    def spoilt(chunks: Sequence[ChunkRows]) -> Tensor:
        nonlocal steps
        logits, place = run(chunks).clone(), 0
        for chunk in chunks:
            if chunk.start == 0:
                (slots.add if tuple(chunk.token_ids) == prompt else slots.discard)(chunk.slot)
            if chunk.slot in slots and chunk.num_logits and steps >= at_step:
                spoil(logits[place])
            place += chunk.num_logits
        steps += 1
        return logits

    setattr(state, "run", spoilt)  # noqa: B010 - of a Protocol


@pytest.mark.parametrize("sampling", [NEW, DRAWN])
@pytest.mark.parametrize("at_step", [0, 3])
@pytest.mark.parametrize(
    "spoil", [whole(np.nan), at(0, np.nan), at(70, np.nan), at(5, np.inf), whole(-np.inf)]
)
def test_a_row_that_is_no_distribution_ends_its_request_alone(
    tiny_model: Path, sampling: SamplingParams, at_step: int, spoil: Spoil
) -> None:
    expected = finish(small_engine(tiny_model), [Request(n, ids, sampling) for n, ids in PROMPTS.items()])
    engine = small_engine(tiny_model)
    spoil_row_of(engine, PROMPTS["b"], at_step, spoil)
    for name, ids in PROMPTS.items():
        engine.add(Request(name, ids, sampling))
    found: dict[str, tuple[int, ...]] = {}
    failed: list[tuple[str, type[Exception]]] = []
    while engine.has_work:
        result = engine.step()
        engine.check_integrity()
        failed += [(name, type(error)) for name, error in result.failed]
        for output in result.tokens:
            found[output.request_id] = found.get(output.request_id, ()) + output.token_ids
    assert failed == [("b", InvalidLogits)]
    assert found.pop("b", ()) == expected["b"][:at_step]
    assert found == {name: expected[name] for name in "ac"}
    assert engine.statistics().pool.held == 0


def test_a_row_of_a_prompt_that_is_to_be_told_counts_too(tiny_model: Path) -> None:
    engine = small_engine(tiny_model)
    spoil_row_of(engine, PROMPTS["b"], 0, at(3, np.nan))
    engine.add(Request("b", PROMPTS["b"], SamplingParams(max_tokens=2, prompt_logprobs=1)))
    (name, error), *others = engine.step().failed
    assert (name, type(error), others) == ("b", InvalidLogits, [])
    assert not engine.has_work
    assert engine.statistics().pool.cached == 0, "nobody finds what may be as broken"


def test_the_error_names_the_token() -> None:
    row = np.zeros(8, np.float32)
    check_logits(row)
    row[5] = np.nan
    with pytest.raises(InvalidLogits, match="that of token 5 is nan"):
        check_logits(row)


def no_memory(*arguments: object) -> NoReturn:
    raise MemoryError("none")


def no_torch_memory(*arguments: object) -> NoReturn:
    raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")


def broken(*arguments: object) -> NoReturn:
    raise RuntimeError("a bug")


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("fault", [no_memory, no_torch_memory])
def test_a_copy_for_host_memory_ends_nothing(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, policy: str, fault: Callable[..., Any]
) -> None:
    requests = [Request(name, ids, NEW) for name, ids in PROMPTS.items()]
    expected = finish(small_engine(tiny_model), requests)
    engine = small_engine(tiny_model, tiers={"host_bytes": 1 << 20, "policy": policy})
    monkeypatch.setattr(engine.state, "export_block", fault)
    assert finish(engine, requests) == expected
    engine.pool.release(engine.pool.allocate(engine.pool.num_available))
    assert finish(engine, [Request("again", PROMPTS["a"], NEW)])["again"] == expected["a"]
    kept = engine.statistics().tiers.blocks
    assert kept.entries == 0
    assert kept.refused > 0


def test_another_error_of_a_copy_is_no_lack_of_memory(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = small_engine(tiny_model, tiers={"host_bytes": 1 << 20})
    monkeypatch.setattr(engine.state, "export_block", broken)
    engine.add(Request("a", PROMPTS["a"], NEW))
    with pytest.raises(RuntimeError, match="a bug"):
        engine.step()


@pytest.mark.parametrize("limit", [1, 2])
def test_who_cannot_be_swapped_out_is_computed_again(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    low = Request("low", PROMPTS["a"], DRAWN, priority=5)
    expected = finish(small_engine(tiny_model), [low])["low"]
    tiers = {"host_bytes": 8 << 20}
    engine = small_engine(tiny_model, preemption="swap", tiers=tiers, max_sequences=limit)
    monkeypatch.setattr(engine.state, "export", no_memory)
    engine.add(low)
    first = engine.step().tokens[0].token_ids
    for name in "bc":
        engine.add(Request(name, PROMPTS[name], NEW))
    outputs, _ = drain(engine)
    assert (*first, *outputs["low"]) == expected
    assert engine.statistics().scheduler.preemptions >= 1
    assert engine.statistics().tiers.blocks.reserved_bytes == 0


def test_who_comes_back_in_the_step_that_cannot_swap_it_out_is_computed_again(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [Request("low", PROMPTS["a"], DRAWN), Request("other", PROMPTS["b"], DRAWN)]
    expected = finish(small_engine(tiny_model), requests)
    engine = small_engine(tiny_model, preemption="swap", tiers={"host_bytes": 8 << 20})
    monkeypatch.setattr(engine.state, "export", no_memory)
    for request in requests:
        engine.add(request)
    found = {output.request_id: output.token_ids for output in engine.step().tokens}
    engine._scheduler._preempt(engine._intake.sequences["low"])
    while engine.has_work:
        for output in engine.step().tokens:
            found[output.request_id] += output.token_ids
        engine.check_integrity()
    assert found == expected
    assert engine.statistics().scheduler.swapped == 0


def test_a_hand_off_without_memory_ends_its_request_alone(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = small_engine(tiny_model, role="prefill")
    export, calls = engine.state.export, 0

    def second_fails(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return no_memory() if calls == 2 else export(*arguments)

    monkeypatch.setattr(engine.state, "export", second_fails)
    engine.add(Request("several", PROMPTS["a"], NEW, choices=3))
    engine.add(Request("other", PROMPTS["b"], NEW))
    result = engine.step()
    assert [(name, type(error)) for name, error in result.failed] == [("several", Overloaded)]
    assert [handoff.header.request_id for handoff in result.handoffs] == ["other"]
    engine.check_integrity()
    assert not engine.has_work
