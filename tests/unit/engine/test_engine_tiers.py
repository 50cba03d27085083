"""KV that goes to host memory and disk comes back bit for bit, and a tier that fails costs time alone."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_runs import (
    GOLDEN,
    KINDS,
    Make,
    Outputs,
    drain,
    engines_of,
    finish,
    finish_disaggregated,
    forget_device,
    prompt,
    small_engine,
)

from engine import Engine, Request, SamplingParams
from engine.errors import InvalidRequest, Overloaded
from protocol.stages import STAGES

NEW = SamplingParams(max_tokens=6, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=6, temperature=1.0, seed=5, ignore_eos=True)
HOST = {"host_bytes": 8 << 20}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make(kind: str, tiny_model: Path, cpu_library: Path) -> Iterator[Make]:
    with engines_of(kind, tiny_model) as made:
        yield made


def test_a_prefix_comes_back_from_host_memory(make: Make) -> None:
    expected = finish(make(), [Request("again", prompt(100), NEW)])
    engine = make(tiers=HOST)
    finish(engine, [Request("first", prompt(100), NEW)])
    forget_device(engine)
    assert finish(engine, [Request("again", prompt(100), NEW)]) == expected
    assert engine.statistics().scheduler.loaded_blocks >= 5


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_a_prefix_comes_back_from_the_disk_of_an_engine_that_is_gone(
    make: Make, kind: str, policy: str, tmp_path: Path
) -> None:
    tiers = {**HOST, "disk_path": str(tmp_path), "policy": policy}
    first = make(tiers=tiers)
    finish(first, [Request("first", prompt(100), NEW)])
    forget_device(first)
    first.step()  # carries out what eviction has ordered
    first.close()
    second = make(tiers=tiers)
    replayed = make()  # behind the same prefix, without windows
    if kind == "replay":
        replayed = make(tiers={"window_bytes": 0})
        finish(replayed, [Request("first", prompt(100), NEW)])
    expected = finish(replayed, [Request("again", prompt(100), NEW)])
    assert finish(second, [Request("again", prompt(100), NEW)]) == expected
    counts = second.statistics()
    assert counts.scheduler.loaded_blocks >= 5
    assert counts.tiers.disk is not None
    assert counts.tiers.disk.hits >= 5
    assert counts.scheduler.exact_resumes == (kind == "whole")
    assert counts.scheduler.replayed_resumes == (kind == "replay")


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_a_corrupt_disk_costs_hits_and_nothing_else(make: Make, damage: str, tmp_path: Path) -> None:
    tiers = {**HOST, "disk_path": str(tmp_path)}
    expected = finish(make(), [Request("again", prompt(100), NEW)])
    first = make(tiers=tiers)
    finish(first, [Request("first", prompt(100), NEW)])
    first.close()
    second = make(tiers=tiers)
    for path in tmp_path.glob("??/*"):
        data = path.read_bytes()
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes(data[:-1] if damage == "cut" else data[:-1] + bytes([data[-1] ^ 1]))
    assert finish(second, [Request("again", prompt(100), NEW)]) == expected
    counts = second.statistics()
    assert counts.scheduler.loaded_blocks == 0
    assert counts.tiers.disk is not None
    assert (counts.tiers.disk.corrupt > 0) == (damage != "gone")


def test_a_disk_that_does_not_answer_is_not_waited_for(make: Make, tmp_path: Path) -> None:
    tiers = {**HOST, "disk_path": str(tmp_path), "load_timeout_s": 0.01}
    first = make(tiers=tiers)
    expected = finish(first, [Request("r", prompt(100), NEW)])
    first.close()
    second = make(tiers=tiers)
    disk = second._residence.tiers._disk
    assert disk is not None
    with disk._tier_lock:
        second.add(Request("r", prompt(100), NEW))
        outputs: Outputs = {"r": ()}
        while second.has_work:
            for output in second.step().tokens:
                outputs["r"] += output.token_ids
    assert outputs == expected


@pytest.mark.parametrize("sampling", [NEW, SAMPLED], ids=["greedy", "sampled"])
def test_swapped_out_and_in_equals_undisturbed(make: Make, sampling: SamplingParams) -> None:
    expected = finish(make(), [Request("r", prompt(100), sampling)])
    engine = make(tiers=HOST, preemption="swap")
    engine.add(Request("r", prompt(100), sampling))
    tokens: tuple[int, ...] = ()
    while not tokens:
        tokens = tuple(token for output in engine.step().tokens for token in output.token_ids)
    (sequence,) = engine._scheduler.running
    engine._scheduler._preempt(sequence)
    rows = engine.statistics().rows
    rest, _ = drain(engine)
    assert tokens + rest["r"] == expected["r"]
    counts = engine.statistics()
    assert (counts.scheduler.swapped, counts.rows - rows) == (1, 5)  # nothing was computed again
    assert counts.swapped_bytes > 0
    assert counts.tiers.blocks.reserved_bytes == 0


def test_a_swapped_request_that_is_aborted_leaves_nothing(make: Make) -> None:
    engine = make(tiers=HOST, preemption="swap", max_sequences=1)
    engine.add(Request("low", prompt(40), NEW, priority=1))
    engine.step()
    engine.add(Request("high", prompt(40, 1), NEW))
    engine.step()
    assert engine.statistics().tiers.blocks.reserved_bytes > 0
    engine.check_integrity()
    assert engine.abort("low")
    engine.check_integrity()
    assert engine.statistics().tiers.blocks.reserved_bytes == 0
    drain(engine)


def test_urgent_requests_take_the_place_of_others_which_lose_no_token(make: Make) -> None:
    requests = [Request("low", prompt(40), NEW, priority=1), Request("high", prompt(40, 1), NEW)]
    expected = finish(make(), requests)
    engine = make(max_sequences=1)
    order: list[str] = []
    outputs: Outputs = {}
    engine.add(requests[0])
    engine.step()
    engine.add(requests[1])
    while engine.has_work:
        for output in engine.step().tokens:
            engine.check_integrity()
            outputs[output.request_id] = outputs.get(output.request_id, ()) + output.token_ids
            order += [output.request_id] if output.finish_reason else []
    assert order == ["high", "low"]
    assert outputs["high"] == expected["high"]
    assert outputs["low"] == expected["low"][-len(outputs["low"]) :]


def choices_of(engine: Engine, request: Request) -> dict[int, tuple[int, ...]]:
    engine.add(request)
    found: dict[int, tuple[int, ...]] = {}
    while engine.has_work:
        for output in engine.step().tokens:
            assert output.request_id == request.id
            found[output.choice] = found.get(output.choice, ()) + output.token_ids
        engine.check_integrity()
    return found


@pytest.mark.parametrize("limit", [8, 2])
def test_choices_share_one_prompt_and_equal_single_requests(make: Make, limit: int) -> None:
    engine = make(max_sequences=limit)
    found = choices_of(engine, Request("r", prompt(90), SAMPLED, choices=4))
    assert found.keys() == {0, 1, 2, 3}
    for number, tokens in found.items():
        seeded = SamplingParams(max_tokens=6, temperature=1.0, seed=5 + number, ignore_eos=True)
        assert finish(make(), [Request("one", prompt(90), seeded)])["one"] == tokens
    assert len(set(found.values())) > 1
    counts = engine.statistics()
    if limit == 8:
        assert counts.rows == 90 + 4 * 5
        assert counts.scheduler.copied_blocks == 3  # of the last, partial block; one keeps it


def test_aborting_a_request_ends_all_its_choices(make: Make) -> None:
    engine = make()
    engine.add(Request("r", prompt(40), SAMPLED, choices=3))
    engine.step()
    engine.step()
    assert engine.abort("r")
    assert not engine.has_work
    engine.check_integrity()
    assert engine.statistics().pool.held == 0


def test_choices_survive_the_hand_off(make: Make) -> None:
    expected = choices_of(make(), Request("r", prompt(50), SAMPLED, choices=3))
    prefill, decode = make(role="prefill"), make(role="decode")
    found: dict[int, tuple[int, ...]] = {}
    prefill.add(Request("r", prompt(50), SAMPLED, choices=3))
    while prefill.has_work or decode.has_work:
        for engine in (prefill, decode):
            result = engine.step()
            engine.check_integrity()
            for output in result.tokens:
                found[output.choice] = found.get(output.choice, ()) + output.token_ids
            for handoff in result.handoffs:
                decode.adopt(handoff)
    assert found == expected


def test_a_fork_goes_on_like_the_request_that_it_left(make: Make) -> None:
    expected = finish(make(), [Request("r", prompt(70), NEW)])["r"]
    engine = make()
    engine.add(Request("r", prompt(70), NEW))
    outputs: dict[str, tuple[int, ...]] = {"r": (), "fork": ()}
    while engine.has_work:
        for output in engine.step().tokens:
            outputs[output.request_id] += output.token_ids
        if len(outputs["r"]) == 3 and not outputs["fork"] and "fork" not in engine.requests:
            engine.fork("r", "fork")
            engine.check_integrity()
    assert outputs == {"r": expected, "fork": expected[3:]}
    assert engine.statistics().scheduler.copied_blocks == 1
    with pytest.raises(InvalidRequest, match="has not begun"):
        engine.fork("r", "late")


def test_a_stream_goes_on_at_another_engine(make: Make) -> None:
    expected = finish(make(), [Request("r", prompt(70), SAMPLED)])["r"]
    for done in (1, 5):
        moved = Request("r", prompt(70), SAMPLED, generated_ids=expected[:done])
        assert finish(make(), [moved])["r"] == expected[done:]
        pair = make(role="prefill"), make(role="decode")
        assert finish_disaggregated(*pair, [moved])["r"] == expected[done:]


def test_a_full_queue_says_when_to_come_again(tiny_model: Path, cpu_library: Path) -> None:
    engine = small_engine(tiny_model, max_waiting=1)
    engine.add(Request("a", prompt(5), NEW))
    waits: list[float] = []
    for _ in range(3):
        with pytest.raises(Overloaded, match="1 requests are waiting") as refused:
            engine.add(Request("b", prompt(5), NEW))
        waits.append(refused.value.retry_after_s)
    assert waits == [1.0, 2.0, 3.0]
    drain(engine)


def test_hand_offs_are_preempted_and_computed_again_behind_their_lineage(make: Make) -> None:
    expected = finish(make(), [Request("r", prompt(70), NEW)])
    prefill, decode = make(role="prefill"), make(role="decode", tiers=HOST, preemption="swap")
    assert finish_disaggregated(prefill, decode, [Request("r", prompt(70), NEW)]) == expected


@pytest.mark.parametrize("role", ["both", "pair"])
def test_requests_carry_the_time_of_their_stages(role: str, cpu_library: Path) -> None:
    """Each has all of the steps that it was in, a hand-off's among them; nothing else is in the clock."""
    roles = ("both",) if role == "both" else ("prefill", "decode")
    engines = [small_engine(GOLDEN, kv_cache_bytes=1 << 20, role=role) for role in roles]
    engines[0].add(Request("r", prompt(60), NEW))
    last = None
    while any(engine.has_work for engine in engines):
        for engine in engines:
            result = engine.step()
            last = result.tokens[-1].stages if result.tokens else last
            for handoff in result.handoffs:
                engines[-1].adopt(handoff)
    assert last is not None
    assert last.spent is not None
    clocks = [engine.state.stages.spent() for engine in engines if engine.state.stages is not None]
    for stage in STAGES:
        assert last.spent.of(stage) == sum(clock.of(stage) for clock in clocks) > 0
    for engine in engines:
        engine.close()
