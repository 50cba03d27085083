"""KV that there is no memory to bring to the device is computed again, to the same tokens."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_runs import KINDS, Make, Outputs, engines_of, finish, finish_disaggregated, forget_device

from engine import Engine, Request, SamplingParams
from engine.errors import Overloaded

NEW = SamplingParams(max_tokens=6, ignore_eos=True)
HOST = {"host_bytes": 8 << 20}


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, tiny_model: Path, cpu_library: Path) -> Iterator[Make]:
    with engines_of(request.param, tiny_model) as made:
        yield made


def prompt(start: int, length: int = 90) -> tuple[int, ...]:
    return tuple(3 + (start + 7 * place) % 40 for place in range(length))


def fail(engine: Engine, method: str, times: int, patch: pytest.MonkeyPatch) -> list[str]:
    """The first `times` calls find no memory, once half of the work is done."""
    calls: list[str] = []
    call = getattr(engine.state, method)

    def called(*arguments: Any) -> None:
        calls.append(method)
        call(*arguments)
        if len(calls) <= times:
            raise MemoryError

    patch.setattr(engine.state, method, called)
    return calls


def run(engine: Engine, *requests: Request) -> tuple[Outputs, dict[str, Exception]]:
    """Tokens and errors; a step whose KV did not come does nothing."""
    for request in requests:
        engine.add(request)
    found, failed, steps = Outputs(), dict[str, Exception](), 0
    while engine.has_work:
        result = engine.step()
        engine.check_integrity()
        failed.update(result.failed)
        for output in result.tokens:
            found[output.request_id] = found.get(output.request_id, ()) + output.token_ids
        steps += 1
        assert steps < 500, "it comes to no end"
    assert engine.statistics().pool.held == 0
    return found, failed


@pytest.mark.parametrize("times", [1, 2, 1000])
def test_a_hand_off_without_memory_is_computed_again(
    make: Make, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    requests = [Request(name, prompt(0, 90 + number), NEW) for number, name in enumerate("abc")]
    expected = finish(make(), requests)
    prefill, decode = make(role="prefill"), make(role="decode", tiers=HOST)
    calls = fail(decode, "import_", times, monkeypatch)
    assert finish_disaggregated(prefill, decode, requests) == expected
    assert calls


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("times", [1, 3, 1000])
def test_blocks_without_memory_are_computed_again(
    make: Make, monkeypatch: pytest.MonkeyPatch, times: int, policy: str
) -> None:
    """With replay, behind windows that were run again at the place where it was to go on."""

    def with_prefix_in_host_memory() -> Engine:
        engine = make(tiers={**HOST, "window_bytes": 0, "policy": policy})
        finish(engine, [Request("first", prompt(0), NEW)])
        forget_device(engine)
        engine.step()  # carries out what eviction has ordered
        return engine

    again = Request("again", prompt(0), NEW)
    expected = finish(with_prefix_in_host_memory(), [again])
    engine = with_prefix_in_host_memory()
    calls = fail(engine, "import_block", times, monkeypatch)
    assert run(engine, again) == (expected, {})
    assert calls


@pytest.mark.parametrize("times", [1, 1000])
def test_a_swapped_state_without_memory_is_computed_again(
    make: Make, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    low, high = Request("low", prompt(0), NEW, priority=1), Request("high", prompt(50), NEW)
    expected = {**finish(make(), [low]), **finish(make(), [high])}
    engine = make(tiers=HOST, preemption="swap", max_sequences=1)
    calls = fail(engine, "import_", times, monkeypatch)
    engine.add(low)
    began = [output for _ in range(2) for output in engine.step().tokens]
    engine.add(high)
    outputs, failed = run(engine)
    outputs["low"] = tuple(token for output in began for token in output.token_ids) + outputs["low"]
    assert (outputs, failed) == (expected, {})
    assert calls


@pytest.mark.parametrize("times", [1, 1000])
def test_a_request_without_memory_for_its_windows_has_two_tries_and_ends_alone(
    make: Make, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    requests = [Request("again", prompt(0), NEW), Request("other", prompt(50), NEW)]

    def with_windows() -> Engine:
        engine = make(tiers={**HOST, "window_bytes": 4 << 20})
        finish(engine, [Request("first", prompt(0), NEW), Request("second", prompt(50), NEW)])
        return engine

    undisturbed, engine = with_windows(), with_windows()
    expected = finish(undisturbed, requests)
    import_windows, tries = engine.state.import_windows, list[int]()

    def imported(slot: int, *rest: Any) -> None:
        import_windows(slot, *rest)
        running = engine._scheduler.running
        if slot in {sequence.slot for sequence in running if sequence.request.id == "again"}:
            tries.append(slot)
            if len(tries) <= times:
                raise MemoryError

    monkeypatch.setattr(engine.state, "import_windows", imported)
    found, failed = run(engine, *requests)
    if not tries:
        pytest.skip("it has no windows")
    assert len(tries) == 2
    if times == 1:
        assert (found, failed) == (expected, {})
    else:
        assert isinstance(failed.pop("again"), Overloaded)
        assert (found, failed) == ({"other": expected["other"]}, {})
