"""Encoder, bridge and decoder: timed, and interrupted between each other without a trace."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_runs import finish, small_engine

from engine import Engine, Request, SamplingParams
from engine.model.stages import STAGES, StageClock, StageInterrupted

GOLDEN = Path(__file__).parents[2] / "data" / "v41_golden"
IDS: list[int] = json.loads((GOLDEN / "a" / "ids.json").read_text())
NEW = SamplingParams(max_tokens=4, ignore_eos=True)


class Ticks:
    """A clock that counts its readings, and at one of them does something: asks for an end."""

    def __init__(self) -> None:
        self.now, self.stop_at, self.stages = 0, -1, StageClock(self)
        self.act: Callable[[], None] = self.stages.interrupt

    def __call__(self) -> int:
        self.now += 1
        if self.now == self.stop_at:
            self.act()
        return self.now


def engine_of(golden: str, **settings: object) -> tuple[Engine, Ticks]:
    engine = small_engine(GOLDEN / golden, kv_cache_bytes=1 << 20, **settings)
    ticks = Ticks()
    engine.state.stages = ticks.stages  # pyright: ignore[reportAttributeAccessIssue]
    return engine, ticks


def requests(*lengths: int) -> list[Request]:
    return [Request(f"r{n}", tuple(IDS[n : n + length]), NEW) for n, length in enumerate(lengths)]


def test_each_stage_of_a_step_takes_its_time(cpu_library: Path) -> None:
    engine, _ = engine_of("a")
    finish(engine, requests(40))
    stages = engine.statistics().stages
    assert stages is not None
    steps = engine.statistics().steps
    assert (stages.encoder_ns, stages.bridge_ns, stages.decoder_ns) == (steps, steps, steps)
    assert (stages.steps, stages.interrupted) == (steps, 0)


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("reading", [2, 3])  # behind the encoder, behind the bridge
@pytest.mark.parametrize("step", [0, 1, 3, 6])
def test_an_interrupted_step_leaves_no_trace(
    cpu_library: Path, replay: bool, reading: int, step: int
) -> None:
    settings = {"replay": replay, "token_budget": 24}
    expected = finish(engine_of("a", **settings)[0], requests(61, 40))
    engine, ticks = engine_of("a", **settings)
    for request in requests(61, 40):
        engine.add(request)
    outputs: dict[str, tuple[int, ...]] = {}
    number = 0
    while engine.has_work:
        before = _held(engine)
        if number == step:
            ticks.stop_at = ticks.now + reading
        result = engine.step()
        if number == step:
            assert (result.num_rows, ticks.stages.times().interrupted) == (0, 1)
            after = _held(engine)
            assert all(after[name] == state for name, state in before.items())
        engine.check_integrity()
        for output in result.tokens:
            outputs[output.request_id] = outputs.get(output.request_id, ()) + output.token_ids
        number += 1
    assert outputs == expected
    assert engine.statistics().rows == 61 + 40 + 2 * (NEW.max_tokens - 1)


def test_the_step_behind_an_interrupted_one_runs_through() -> None:
    ticks = Ticks()
    outcomes: list[str] = []
    for _ in range(4):
        ticks.stages.begin(interruptible=True)
        ticks.stages.interrupt()
        try:
            for stage in STAGES:
                ticks.stages.passed(stage)
            outcomes.append("through")
        except StageInterrupted:
            outcomes.append("interrupted")
    assert outcomes == ["interrupted", "through"] * 2


def test_an_abort_from_another_thread_ends_the_step_of_that_request_alone(cpu_library: Path) -> None:
    for lengths, ends in (((60,), True), ((60, 30), False)):
        engine, ticks = engine_of("a", token_budget=128)
        for request in requests(*lengths):
            engine.add(request)

        def abort(engine: Engine = engine) -> None:
            thread = threading.Thread(target=engine.interrupt, args=("r0",))
            thread.start()
            thread.join()

        ticks.act, ticks.stop_at = abort, 2  # behind the encoder
        assert (engine.step().num_rows == 0) is ends
        engine.abort("r0")
        finish(engine)


def test_nothing_is_interrupted_between_steps_or_without_stages(cpu_library: Path) -> None:
    engine, ticks = engine_of("a")
    engine.interrupt()
    finish(engine, requests(40))
    assert ticks.stages.times().interrupted == 0


def _held(engine: Engine) -> dict[str, bytes]:
    """What each running sequence has, as a hand-off would carry it."""
    return {
        s.id: engine.state.export(s.held(s.num_computed)).tobytes()
        for s in engine._scheduler.running  # pyright: ignore[reportPrivateUsage]
    }
