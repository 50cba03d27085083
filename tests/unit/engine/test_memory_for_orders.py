"""No memory for what the engine does to its state before a step: whoever lacks something by it begins again,
to the same tokens, the others go on, and who can never begin ends by name."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_runs import KINDS, Make, engines_of, outcomes

from engine import Engine, Request, SamplingParams
from engine.errors import Overloaded
from engine.scheduler.orders import Begin, CopyBlock, SwapOut

DRAWN = SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.0, seed=4)
Fault = Callable[[], Exception]


def torch_memory() -> Exception:
    return RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, tiny_model: Path, cpu_library: Path) -> Iterator[Make]:
    with engines_of(request.param, tiny_model) as made:
        yield made


@pytest.fixture
def llama(tiny_model: Path, cpu_library: Path) -> Iterator[Make]:
    with engines_of("llama", tiny_model) as made:
        yield made


def prompt(start: int, length: int = 67) -> tuple[int, ...]:
    return tuple(3 + (start + 7 * place) % 40 for place in range(length))


def no_memory(
    engine: Engine, method: str, times: int, patch: pytest.MonkeyPatch, fault: Fault = MemoryError
) -> list[tuple[Any, ...]]:
    """The first `times` calls do nothing but raise."""
    calls: list[tuple[Any, ...]] = []
    call = getattr(engine.state, method)

    def called(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) <= times:
            raise fault()
        call(*arguments)

    patch.setattr(engine.state, method, called)
    return calls


@pytest.mark.parametrize(("times", "fault"), [(1, MemoryError), (2, torch_memory), (1000, MemoryError)])
def test_outputs_whose_copy_of_a_block_failed_have_the_same_tokens(
    make: Make, monkeypatch: pytest.MonkeyPatch, times: int, fault: Fault
) -> None:
    several, other = Request("b", prompt(20), DRAWN, choices=3), Request("other", prompt(3, 40), DRAWN)
    expected = make()
    for request in (several, other):
        expected.add(request)
    engine = make()
    calls = no_memory(engine, "copy_block", times, monkeypatch, fault)
    for request in (several, other):
        engine.add(request)
    assert outcomes(engine) == outcomes(expected)
    assert calls


def test_what_is_swapped_out_with_a_block_that_failed_is_lost(
    llama: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = llama(tiers={"host_bytes": 8 << 20}, preemption="swap")
    engine.add(Request("a", prompt(0), DRAWN))
    engine.step()
    sequence = engine._scheduler.running[0]
    held, residence = sequence.held(sequence.num_computed), engine._residence
    no_memory(engine, "copy_block", 1, monkeypatch)
    assert residence.tiers.reserve(held)
    residence.carry_out([CopyBlock(0, held.blocks[-1]), SwapOut(sequence, held)])
    assert residence.take_lost() == [sequence]
    assert residence.swapped_bytes == 0
    residence.carry_out([CopyBlock(0, held.blocks[-1])])
    assert not residence.bad_blocks


def test_what_cannot_be_kept_of_a_swap_is_lost(llama: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever on its way: one that waits for a state that never comes would go on without it."""
    low, high = Request("low", prompt(0), DRAWN, priority=1), Request("high", prompt(5), DRAWN)
    undisturbed = llama()
    undisturbed.add(low)
    undisturbed.add(high)
    expected, _ = outcomes(undisturbed)
    engine = llama(tiers={"host_bytes": 8 << 20}, preemption="swap", max_sequences=1)
    engine.add(low)
    begun = [output for _ in range(2) for output in engine.step().tokens]
    engine.add(high)

    def short(copy: Any) -> None:
        monkeypatch.undo()
        raise MemoryError

    monkeypatch.setattr("engine.residence._copied", short)
    ids, failed = run_on(engine, ())
    assert not failed
    began = tuple(token for output in begun for token in output.token_ids)
    assert ids == expected["high", 0] + expected["low", 0][len(began) :]
    engine.check_integrity()
    assert engine.statistics().tiers.blocks.reserved_bytes == 0


def begin_fails(engine: Engine, name: str, times: int, patch: pytest.MonkeyPatch) -> list[int]:
    """To begin finds no memory, for that request alone."""
    begin, tries = engine.state.begin, list[int]()

    def begun(slot: int, token_ids: Any) -> None:
        running = engine._scheduler.running
        if slot in {sequence.slot for sequence in running if sequence.request.id == name}:
            tries.append(slot)
            if len(tries) <= times:
                raise MemoryError
        begin(slot, token_ids)

    patch.setattr(engine.state, "begin", begun)
    return tries


@pytest.mark.parametrize("times", [1, 1000])
def test_a_request_that_cannot_begin_has_two_tries_and_ends_alone(
    make: Make, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    requests = [Request(name, prompt(start), DRAWN) for name, start in (("a", 0), ("b", 5), ("c", 9))]
    undisturbed, engine = make(), make()
    for request in requests:
        undisturbed.add(request)
        engine.add(request)
    expected, _ = outcomes(undisturbed)
    tries = begin_fails(engine, "a", times, monkeypatch)
    texts, failed = outcomes(engine)
    assert len(tries) == 2
    assert engine.statistics().scheduler.preemptions == min(times, 2), "that of the others"
    if times == 1:
        assert (texts, failed) == (expected, {})
    else:
        assert failed.keys() == {"a"}
        assert isinstance(failed["a"], Overloaded)
        assert "to begin" in str(failed["a"])
        assert texts == {key: ids for key, ids in expected.items() if key[0] != "a"}


def test_tries_to_begin_are_counted_in_a_row(llama: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = llama()
    engine.add(Request("a", prompt(0), DRAWN))
    tries = begin_fails(engine, "a", 1, monkeypatch)
    engine.step()
    (output,) = engine.step().tokens
    engine._scheduler._preempt(engine._scheduler.running[0])
    tries.clear()
    _, failed = run_on(engine, output.token_ids)
    assert not failed
    assert len(tries) == 2


def run_on(engine: Engine, begun: tuple[int, ...]) -> tuple[tuple[int, ...], dict[str, Exception]]:
    failed: dict[str, Exception] = {}
    while engine.has_work:
        result = engine.step()
        failed.update(result.failed)
        begun += tuple(token for output in result.tokens for token in output.token_ids)
    return begun, failed


def test_who_shares_what_came_with_a_state_that_failed_begins_again_too(
    llama: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of a hand-off are known from the moment that it has room: the next one takes them."""
    requests = [Request(name, prompt(0), DRAWN) for name in "ab"]
    undisturbed = llama()
    for request in requests:
        undisturbed.add(request)
    expected, _ = outcomes(undisturbed)
    prefill, decode = llama(role="prefill"), llama(role="decode", tiers={"host_bytes": 8 << 20})
    imported = no_memory(decode, "import_", 1, monkeypatch)
    for request in requests:
        prefill.add(request)
    handoffs = [handoff for _ in range(3) for handoff in prefill.step().handoffs]
    for handoff in handoffs:
        decode.adopt(handoff)
    plans: list[list[Any]] = []
    carry_out = decode._residence.carry_out
    monkeypatch.setattr(decode._residence, "carry_out", lambda o: plans.append(o) or carry_out(o))
    decode.step()
    begins = [order for order in plans[0] if isinstance(order, Begin)]
    assert len(begins) == 2
    assert set(begins[0].fresh) & set(begins[1].held.blocks)
    assert len(imported) == 2
    assert decode.pool.statistics().held == 0
    texts = {("a", 0): (), ("b", 0): ()}
    while decode.has_work:
        for output in decode.step().tokens:
            texts[output.request_id, 0] += output.token_ids
        decode.check_integrity()
    assert {key: ids[1:] for key, ids in expected.items()} == texts
