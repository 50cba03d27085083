"""Memory that does not suffice for a step: its rows run part by part, to the same tokens, and a request of
which not one row fits ends alone."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from engine_runs import Texts, outcomes, small_engine

from engine import Engine, Request, SamplingParams
from engine.errors import Overloaded
from engine.model.deepseek.rope import RotaryTable
from engine.model.deepseek.step import Step
from engine.model_path import model_path

NEW = SamplingParams(max_tokens=8, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.0, seed=4)
LENGTHS = {"a": 30, "b": 70, "c": 111, "d": 7}
PROMPTS = {name: tuple(range(20 + i, 20 + i + LENGTHS[name])) for i, name in enumerate(LENGTHS)}
REQUESTS = [
    Request("a", PROMPTS["a"], NEW),
    Request("b", PROMPTS["b"], DRAWN, choices=3),
    Request("c", PROMPTS["c"], NEW),
    Request("d", PROMPTS["d"], DRAWN),
]
Fault = Callable[[], Exception]


def python_memory() -> Exception:
    return MemoryError("none")


def torch_memory() -> Exception:
    """As torch itself says it."""
    try:
        torch.empty(1 << 50, dtype=torch.uint8)
    except RuntimeError as error:
        return error
    raise AssertionError("a petabyte was to be had")


def run(engine: Engine, requests: Sequence[Request] = REQUESTS) -> tuple[Texts, dict[str, Exception]]:
    """Two of the requests come while the others run."""
    for request in requests[:2]:
        engine.add(request)
    return outcomes(engine, late=requests[2:])


def engine_of(model: Path, **settings: object) -> Engine:
    return small_engine(model, token_budget=64, max_sequences=8, kv_cache_bytes=4 << 20, **settings)


@pytest.fixture(scope="module")
def nano() -> Path:
    return model_path("nano")


@pytest.fixture(scope="module")
def undisturbed(nano: Path, cpu_library: Path) -> Texts:
    texts, failed = run(engine_of(nano))
    assert not failed
    return texts


class Shortage:
    """Of every so many calls one fails, in the middle of what a step does."""

    def __init__(self, every: int, fault: Fault) -> None:
        self.every, self.fault, self.calls, self.times = every, fault, 0, 0

    def before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*arguments: Any, **named: Any) -> Any:
            self.calls += 1
            if self.calls % self.every == 0:
                self.times += 1
                raise self.fault()
            return call(*arguments, **named)

        return guarded


def guard(engine: Engine, monkeypatch: pytest.MonkeyPatch, place: str, shortage: Shortage) -> None:
    """Where memory runs out: while a step is planned, in a layer, behind all of them."""
    text = cast(Any, engine.model).text
    if place == "plans":
        monkeypatch.setattr(Step, "__init__", shortage.before(Step.__init__))
    elif place == "head":
        monkeypatch.setattr(text, "head", shortage.before(text.head))
    else:
        chosen = text._blocks[{"first": 0, "middle": len(text._blocks) // 2, "last": -1}[place]]
        kind = cast(Any, type(chosen))  # pyright: ignore[reportUnknownArgumentType]
        call = kind.__call__
        guarded = shortage.before(call)

        def called(block: object, *rest: Any, **named: Any) -> Any:
            return (guarded if block is chosen else call)(block, *rest, **named)

        monkeypatch.setattr(kind, "__call__", called)


@pytest.mark.parametrize(
    ("place", "shortage"),
    [(place, (3, python_memory)) for place in ("plans", "first", "middle", "last")]
    + [("head", (2, torch_memory)), ("last", (7, torch_memory))],
)
def test_no_memory_now_and_then_costs_no_token(
    nano: Path,
    undisturbed: Texts,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    shortage: tuple[int, Fault],
) -> None:
    engine, short = engine_of(nano), Shortage(*shortage)
    guard(engine, monkeypatch, place, short)
    texts, failed = run(engine)
    assert short.times > 1
    assert not failed, "the second try of a row had memory"
    assert texts == undisturbed


def test_no_memory_at_all_ends_each_with_a_name(nano: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(nano)
    with monkeypatch.context() as patch:
        guard(engine, patch, "middle", Shortage(1, python_memory))
        texts, failed = run(engine)
    assert not texts
    assert failed.keys() == {request.id for request in REQUESTS}
    assert all(isinstance(error, Overloaded) and "no memory" in str(error) for error in failed.values())


@pytest.mark.parametrize("most", [3, 40])
def test_memory_for_some_rows_alone_costs_no_token(
    nano: Path, undisturbed: Texts, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    engine, plan, times = engine_of(nano), Step.__init__, 0

    def planned(
        step: Step, operations: Any, cache: Any, tables: Any, rows: list[Any], *rest: Any, **named: Any
    ):
        nonlocal times
        plan(step, operations, cache, tables, rows, *rest, **named)
        if sum(each.count for each in rows) > most:
            times += 1
            raise torch_memory()

    monkeypatch.setattr(Step, "__init__", planned)
    texts, failed = run(engine)
    assert times > 0
    assert (texts, failed) == (undisturbed, {})


@pytest.mark.parametrize("ends", ["b", "c"])
def test_a_request_that_never_fits_ends_alone(
    nano: Path, undisturbed: Texts, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """From its fourth token on: in the middle of its answer, with all of its outputs."""
    engine, plan = engine_of(nano), Step.__init__
    stop = len(PROMPTS[ends]) + 3

    def planned(
        step: Step, operations: Any, cache: Any, tables: Any, rows: list[Any], *rest: Any, **named: Any
    ):
        plan(step, operations, cache, tables, rows, *rest, **named)
        slots = {each.slot for each in rows if each.stop > stop}
        running = engine._scheduler.running  # pyright: ignore
        if slots & {sequence.slot for sequence in running if sequence.request.id == ends}:
            raise MemoryError

    monkeypatch.setattr(Step, "__init__", planned)
    texts, failed = run(engine)
    assert failed.keys() == {ends}
    assert isinstance(failed[ends], Overloaded)
    for key, ids in undisturbed.items():
        assert texts[key] == (ids[:4] if key[0] == ends else ids), key


def test_no_memory_behind_the_layers_of_a_llama(
    tiny_model: Path, cpu_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its keys and values lie in their places by then, and are written again."""
    expected = run(engine_of(tiny_model))
    engine, shortage = engine_of(tiny_model), Shortage(2, torch_memory)
    monkeypatch.setattr(engine.model, "head", shortage.before(cast(Any, engine.model).head))
    assert run(engine) == expected
    assert shortage.times > 3


def test_no_memory_to_choose_a_token_ends_its_request_alone(
    nano: Path, undisturbed: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(nano)
    choose = engine.sampler.choose

    def chosen(row: Any, name: str, *rest: Any) -> Any:
        if name == "a":
            raise MemoryError
        return choose(row, name, *rest)

    monkeypatch.setattr(engine.sampler, "choose", chosen)
    texts, failed = run(engine)
    assert failed.keys() == {"a"}
    assert isinstance(failed["a"], Overloaded)
    assert texts == {key: ids for key, ids in undisturbed.items() if key[0] != "a"}


def test_no_memory_for_more_angles_leaves_those_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cosines and sines grow both or neither: beside longer ones they would turn later positions wrongly."""
    table, whole = (RotaryTable(torch.linspace(1.0, 0.1, 4, dtype=torch.float64)) for _ in range(2))
    places = torch.tensor([0, 5, 3000])
    expected = whole.angles(places)
    table.angles(torch.tensor([3]))
    for calls in (1, 2):
        short = Shortage(calls, torch_memory)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "cat", short.before(torch.cat))
            with pytest.raises(RuntimeError, match="allocate memory"):
                table.angles(places)
    found = table.angles(places)
    assert torch.equal(found.cos, expected.cos)
    assert torch.equal(found.sin, expected.sin)


def test_another_error_is_none_of_memory(nano: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(nano)
    guard(engine, monkeypatch, "middle", Shortage(1, lambda: RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        run(engine)
