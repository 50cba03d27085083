"""V4 in the engine: overlapping groups and every layer's windows come back from wherever they were kept."""

from pathlib import Path
from typing import Any, cast

import pytest
from engine_runs import Outputs, drain, finish
from tiny_v4 import QUANTISED, ids_of, tiny_config, tiny_model

from engine import Engine, EngineConfig, Request, SamplingParams
from engine.checkpoint.folder import CheckpointFolder
from engine.model.deepseek.serving import DeepseekServed

NEW = SamplingParams(max_tokens=9, ignore_eos=True)
IDS = tuple(ids_of(160, 3))
HOST = {"host_bytes": 4 << 20}


class Tiny(DeepseekServed):
    """A V4 of random weights, which has no folder."""

    eos_ids = frozenset[int]()
    fingerprint = "tiny"


@pytest.fixture(params=["released", "off"])
def quantised(request: pytest.FixtureRequest, cpu_library: Path) -> str:
    return request.param


def engine_of(quantised: str, *, replay: bool = True, **settings: object) -> Engine:
    model = Tiny(tiny_model(tiny_config(QUANTISED[quantised])), cast(CheckpointFolder, None), replay=replay)
    values = {"model": "tiny", "kv_cache_bytes": 1 << 20, "block_tokens": 16, "replay": replay, **settings}
    return Engine(EngineConfig.model_validate(values), model=model)


def turn(length: int) -> Request:
    return Request("turn", IDS[:length], NEW)


def cold(quantised: str, length: int, **settings: bool) -> Outputs:
    return finish(engine_of(quantised, **settings), [turn(length)])


@pytest.mark.parametrize("replay", [True, False])
def test_turns_equal_cold_ones_while_windows_are_kept(quantised: str, replay: bool) -> None:
    engine = engine_of(quantised, replay=replay, tiers=HOST)
    for length in (61, 90, 90, 131):
        assert finish(engine, [turn(length)]) == cold(quantised, length, replay=replay)
        engine.pool.release(engine.pool.allocate(engine.pool.num_available))
    counts = engine.statistics().scheduler
    assert (counts.exact_resumes, counts.replayed_resumes) == (3, 0)
    assert counts.loaded_blocks > 0


@pytest.mark.parametrize("how", ["swap", "recompute"])
def test_one_who_gives_way_in_the_middle_of_a_group_goes_on_to_the_same_tokens(
    quantised: str, how: str
) -> None:
    expected = cold(quantised, 77)["turn"]
    for steps in (1, 2, 5):
        engine = engine_of(quantised, max_sequences=1, preemption=how, tiers=HOST)
        engine.add(Request("turn", IDS[:77], NEW, priority=1))
        tokens: tuple[int, ...] = ()
        while len(tokens) < steps:
            tokens += tuple(token for output in engine.step().tokens for token in output.token_ids)
        engine.add(Request("urgent", IDS[100:130], NEW))
        rest, _ = drain(engine)
        assert tokens + rest["turn"] == expected
        assert engine.statistics().scheduler.swapped == (how == "swap")


def test_behind_windows_that_ran_again_a_stream_goes_on_elsewhere(quantised: str) -> None:
    forgetful = {"tiers": {"window_bytes": 0}}
    engine = engine_of(quantised, **forgetful)
    finish(engine, [turn(64)])
    engine.add(turn(140))
    outputs: list[int] = []
    resumed: tuple[int, ...] = ()
    while engine.has_work:
        for output in engine.step().tokens:
            outputs += output.token_ids
            resumed = output.resumed
    assert resumed == (64,)
    moved = Request("moved", IDS[:140], NEW, generated_ids=tuple(outputs[:3]), resumed=resumed)
    fresh = engine_of(quantised, **forgetful)
    assert finish(fresh, [moved])["moved"] == tuple(outputs[3:])
    assert fresh.statistics().scheduler.rebuilt == 1


def test_no_memory_in_the_last_layer_costs_no_token(quantised: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows and open groups of all layers before it have been written over by then."""
    expected = finish(engine_of(quantised, token_budget=48), [turn(160)])
    engine = engine_of(quantised, token_budget=48)
    last: Any = cast(Any, engine.model).text._blocks[-1]
    kind = cast(Any, type(last))  # pyright: ignore[reportUnknownArgumentType]
    call, calls = kind.__call__, 0

    def called(block: object, *rest: Any, **named: Any) -> Any:
        nonlocal calls
        calls += block is last
        if block is last and calls % 3 == 1:
            raise MemoryError
        return call(block, *rest, **named)

    monkeypatch.setattr(kind, "__call__", called)
    assert finish(engine, [turn(160)]) == expected
    assert calls > 3
