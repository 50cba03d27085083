"""What users of other engines complained about, where it concerns one engine; tests are named after it."""

import gc
import json
import random
import shutil
from pathlib import Path

import psutil
import pytest
from engine_runs import drain, finish, small_engine
from tiny_gguf import TOKENS

from engine import Engine, Request, SamplingParams
from engine.errors import Overloaded, UnusableTier
from engine.request import Sequence

GOLDEN = Path(__file__).parents[2] / "data" / "v41_golden" / "b"
IDS: list[int] = json.loads((GOLDEN / "ids.json").read_text())
NEW = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.fixture(params=["llama", "deepseek"])
def small(request: pytest.FixtureRequest, tiny_model: Path, cpu_library: Path) -> Engine:
    """An engine whose cache holds two of the prompts."""
    model = tiny_model if request.param == "llama" else GOLDEN
    engine = small_engine(model, kv_cache_bytes=1 << 20)
    engine.pool.allocate(engine.pool.num_available - 16)
    return engine


def prompt(seed: int, length: int = 110) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(3, min(len(TOKENS), max(IDS))), k=length))


def run(engine: Engine, request: Request) -> tuple[int, ...]:
    engine.add(request)
    tokens: tuple[int, ...] = ()
    while engine.has_work:
        for output in engine.step().tokens:
            tokens += output.token_ids
    return tokens


def test_a_cache_that_was_filled_and_evicted_has_no_phantom_hits(small: Engine) -> None:
    """Three rounds of prompts that drive each other out, each answered as at first."""
    first = {seed: run(small, Request(f"{seed}", prompt(seed), NEW)) for seed in range(6)}
    for _ in range(3):
        for seed, tokens in first.items():
            assert run(small, Request(f"{seed}", prompt(seed), NEW)) == tokens
    assert small.statistics().pool.evictions > 0


def test_a_store_that_is_killed_under_load_costs_hits_and_no_quality(
    tiny_model: Path, cpu_library: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "kv"
    tiers = {"host_bytes": 1 << 20, "disk_path": str(folder)}
    engine = small_engine(tiny_model, tiers=tiers)
    requests = [Request(f"r{n}", prompt(n % 3, 60), NEW) for n in range(9)]
    expected = {r.id: finish(small_engine(tiny_model), [r])[r.id] for r in requests}
    assert finish(engine, requests[:3]) == {r.id: expected[r.id] for r in requests[:3]}
    for request in requests[3:]:
        engine.add(request)
    engine.step()
    engine._residence.tiers.flush()
    shutil.rmtree(folder)
    folder.write_text("in the way")
    rest, _ = drain(engine)
    assert {name: tokens[-3:] for name, tokens in rest.items()} == {
        r.id: expected[r.id][-3:] for r in requests[3:]
    }
    engine.pool.release(engine.pool.allocate(engine.pool.num_available))
    for request in requests:
        engine._residence.tiers.blocks.clear()
        assert finish(engine, [request])[request.id] == expected[request.id]
    engine._residence.tiers.flush()
    disk = engine.statistics().tiers.disk
    assert disk is not None
    assert disk.failures > 0
    assert str(folder) in disk.last_error
    engine.close()


def test_a_folder_that_cannot_be_used_is_named_at_the_start(
    tiny_model: Path, cpu_library: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnusableTier, match=r"tiers\.disk_path"):
        small_engine(tiny_model, tiers={"host_bytes": 1 << 20, "disk_path": str(tmp_path / "file")})


def test_running_decodes_go_on_beside_an_endless_stream_of_long_prompts(
    tiny_model: Path, cpu_library: Path
) -> None:
    engine = small_engine(tiny_model, token_budget=32, max_sequences=6)
    engine.add(Request("decoding", prompt(0, 5), SamplingParams(max_tokens=40, ignore_eos=True)))
    engine.step()
    for number in range(39):
        if engine.statistics().scheduler.waiting < 3:
            engine.add(Request(f"long{number}", prompt(number, 300), NEW))
        assert "decoding" in [output.request_id for output in engine.step().tokens], f"step {number}"


def test_a_prefill_that_was_suspended_resumes(tiny_model: Path, cpu_library: Path) -> None:
    """Behind requests of higher priority that never end coming, by the bound on starvation."""
    engine = small_engine(tiny_model, token_budget=16, max_sequences=2, starvation_s=0.001)
    expected = finish(small_engine(tiny_model), [Request("low", prompt(1, 200), NEW)])["low"]
    engine.add(Request("low", prompt(1, 200), NEW, priority=5))
    tokens: tuple[int, ...] = ()
    for number in range(2000):
        if engine.statistics().scheduler.waiting < 2:
            engine.add(Request(f"high{number}", prompt(number, 40), NEW, priority=-5))
        for output in engine.step().tokens:
            tokens += output.token_ids if output.request_id == "low" else ()
        if len(tokens) == NEW.max_tokens:
            break
    assert tokens == expected


def test_requests_aborted_at_every_stage_leave_nothing(
    tiny_model: Path, cpu_library: Path, tmp_path: Path
) -> None:
    tiers = {"host_bytes": 1 << 20, "disk_path": str(tmp_path)}
    first = small_engine(tiny_model, tiers=tiers)
    finish(first, [Request("r", prompt(0, 60), NEW)])
    first.close()
    engine = small_engine(tiny_model, tiers=tiers, preemption="swap", max_sequences=1)
    for steps in range(6):
        engine.add(Request("low", prompt(steps, 60), NEW, priority=1, choices=2))
        for _ in range(steps):
            engine.step()
        engine.add(Request("high", prompt(0, 60), NEW))
        engine.step()
        for name in ("low", "high"):
            engine.abort(name)
        engine._residence.tiers.flush()
        engine.check_integrity()
        assert not engine.has_work
        assert engine.statistics().pool.held == 0
        assert engine.statistics().tiers.blocks.pinned == 0
    engine.close()


def test_a_full_queue_refuses_with_the_time_to_wait_and_loses_nothing(
    tiny_model: Path, cpu_library: Path
) -> None:
    engine = small_engine(tiny_model, max_waiting=2, max_sequences=1)
    taken = [Request(f"r{n}", prompt(n, 10), NEW) for n in range(2)]
    for request in taken:
        engine.add(request)
    with pytest.raises(Overloaded) as refused:
        engine.add(Request("more", prompt(9, 10), NEW))
    assert refused.value.retry_after_s >= 1
    outputs, _ = drain(engine)
    assert outputs.keys() == {"r0", "r1"}


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_million_short_requests_leave_memory_flat(tiny_model: Path, cpu_library: Path) -> None:
    engine = small_engine(
        tiny_model, max_sequences=64, token_budget=512, kv_events=True, tiers={"host_bytes": 1 << 20}
    )
    process, one = psutil.Process(), SamplingParams(max_tokens=1, ignore_eos=True)
    draw, after_warming = random.Random(0), 0
    for number in range(1_000_000):
        engine.add(Request(f"r{number}", tuple(draw.choices(range(3, len(TOKENS)), k=4)), one))
        if number % 64 == 63:
            while engine.has_work:
                engine.step()
        if number == 100_000:
            gc.collect()
            after_warming = process.memory_info().rss
    engine.check_integrity()
    gc.collect()
    assert process.memory_info().rss - after_warming < 32 << 20


def test_an_idle_engine_keeps_nothing_of_who_has_been_there(tiny_model: Path) -> None:
    def sequences() -> list[Sequence]:
        gc.collect()
        return [thing for thing in gc.get_objects() if type(thing) is Sequence]

    engine, before = small_engine(tiny_model), len(sequences())
    engine.generate([list(range(5, 40))], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(sequences()) == before
