"""KV that goes to host memory and disk comes back bit for bit, and a tier that fails costs time alone."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from engine_runs import Outputs, drain, finish, finish_disaggregated, small_engine
from tiny_gguf import TOKENS, write_tiny_gguf

from engine import Engine, Request, SamplingParams
from engine.errors import BrokenHandoff, InvalidRequest, Overloaded
from engine.model.content_digest import ContentDigest
from protocol.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from protocol.stages import STAGES

GOLDEN = Path(__file__).parents[2] / "data" / "v41_golden" / "b"
IDS: list[int] = json.loads((GOLDEN / "ids.json").read_text())
NEW = SamplingParams(max_tokens=6, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=6, temperature=1.0, seed=5, ignore_eos=True)
HOST = {"host_bytes": 8 << 20}

Make = Callable[..., Engine]


@pytest.fixture(params=["llama", "replay", "whole"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make(kind: str, tiny_model: Path, cpu_library: Path) -> Iterator[Make]:
    """Engines of a llama, and of a DeepSeek with and without replay, closed at the end."""
    made: list[Engine] = []

    def engine(**settings: object) -> Engine:
        if kind == "llama":
            made.append(small_engine(tiny_model, operations="c", **settings))
        else:
            cache = {"kv_cache_bytes": 1 << 20, "replay": kind == "replay"}
            made.append(small_engine(GOLDEN, **{**cache, **settings}))
        return made[-1]

    yield engine
    for one in made:
        one.close()
        one.check_integrity()


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Ids that both models have; equal seeds share their start."""
    return tuple(random.Random(seed).choices(range(3, min(len(TOKENS), max(IDS))), k=length))


def forget_device(engine: Engine) -> None:
    """Evict every block that nobody holds."""
    blocks = engine.pool.allocate(engine.pool.num_available)
    engine.pool.release(blocks)


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


def test_new_weights_make_all_kv_old(tiny_model: Path, cpu_library: Path, tmp_path: Path) -> None:
    other = write_tiny_gguf(tmp_path / "other.gguf", seed=1)
    engine = small_engine(tiny_model, tiers=HOST, preemption="swap", kv_events=True)
    request = Request("r", prompt(50), NEW)
    finish(engine, [request])
    engine.add(Request("running", prompt(50), NEW))
    begun = tuple(token for output in engine.step().tokens for token in output.token_ids)
    engine.update_weights("2", str(other))
    engine.check_integrity()
    _, batch = engine.events_since(0)[-1]
    assert batch.events[0] == AllBlocksCleared()
    rest, _ = drain(engine)
    fresh = small_engine(other)
    moved = Request("running", prompt(50), NEW, generated_ids=begun)
    assert rest == finish(fresh, [moved])
    before = engine.statistics().rows
    assert finish(engine, [request]) == finish(small_engine(other), [request])
    assert engine.statistics().rows - before < 50  # cached under the new version by then
    engine.update_weights("3")
    rows = engine.statistics().rows
    finish(engine, [request])
    assert engine.statistics().rows - rows == 50 + 5
    with pytest.raises(InvalidRequest, match="another shape"):
        engine.update_weights("4", str(GOLDEN))
    assert finish(engine, [request]) == finish(small_engine(other), [request])


def test_a_label_that_another_run_gave_its_weights_finds_none_of_their_kv(
    tiny_model: Path, cpu_library: Path, tmp_path: Path
) -> None:
    """Nothing tells weights that were changed in place from others of the same label."""
    marks: set[str] = set()
    for _ in range(2):
        engine = small_engine(tiny_model, tiers={**HOST, "disk_path": str(tmp_path)}, block_tokens=16)
        engine.update_weights("1")
        finish(engine, [Request("r", prompt(100), NEW)])
        marks.add(engine.fingerprint)
        engine.close()
        counts = engine.statistics()
        assert (counts.scheduler.loaded_blocks, counts.tiers.prefetched) == (0, 0)
    assert len(marks) == 2


def test_weights_changed_in_place_need_a_label_of_their_own(tiny_model: Path, cpu_library: Path) -> None:
    engine = small_engine(tiny_model)
    first = engine.fingerprint
    engine.update_weights("1", str(tiny_model))
    engine.update_weights("2")
    for label in ("", "1", "2"):
        with pytest.raises(InvalidRequest, match="need one that this engine has not had") as refused:
            engine.update_weights(label)
        assert refused.value.parameter == "version"
    engine.update_weights("2", str(tiny_model))
    assert engine.fingerprint == f"{first}@2"
    engine.update_weights("", str(tiny_model))
    assert engine.fingerprint == first


def test_events_tell_what_the_prefix_cache_holds(tiny_model: Path, cpu_library: Path) -> None:
    engine = small_engine(tiny_model, kv_events=True, block_tokens=16)
    finish(engine, [Request("r", prompt(40), NEW)])
    ((number, batch),) = engine.events_since(0)
    (stored,) = batch.events
    assert isinstance(stored, BlockStored)
    assert stored.token_ids == prompt(40)[:32]
    assert len(stored.block_hashes) == 2
    assert engine.events_since(number + 1) == []
    forget_device(engine)
    ((_, batch),) = engine.events_since(number + 1)
    assert batch.events[0] == BlockRemoved(stored.block_hashes[::-1], "GPU")


def test_events_of_blocks_that_come_back_have_their_tokens(tiny_model: Path, cpu_library: Path) -> None:
    engine = small_engine(tiny_model, kv_events=True, block_tokens=16, tiers=HOST)
    finish(engine, [Request("r", prompt(100), NEW)])
    (*_, (number, _)) = engine.events_since(0)
    forget_device(engine)
    finish(engine, [Request("again", prompt(100), NEW)])
    assert engine.statistics().scheduler.loaded_blocks == 6
    told = [event for _, batch in engine.events_since(number + 1) for event in batch.events]
    (stored,) = (event for event in told if isinstance(event, BlockStored) and event.medium == "GPU")
    assert len(stored.block_hashes) == 6
    assert stored.token_ids == prompt(100)[:96]
    engine.close()


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


def test_events_tell_of_host_memory_and_disk(tiny_model: Path, cpu_library: Path, tmp_path: Path) -> None:
    """Whoever adds up events knows at any time what each medium holds."""
    tiers = {"host_bytes": 6 * BLOCK_BYTES, "disk_path": str(tmp_path), "disk_bytes": 1 << 20}
    engine = small_engine(tiny_model, kv_events=True, block_tokens=16, tiers=tiers)
    finish(engine, [Request(f"r{seed}", prompt(70, seed), NEW) for seed in range(3)])
    engine._residence.tiers.flush()
    held = added_up(engine)
    assert len(held["CPU"]) == 6 == engine.statistics().tiers.blocks.entries
    disk = engine.statistics().tiers.disk
    assert disk is not None
    assert len(held["STORAGE"]) == disk.entries > 6
    assert held["CPU"] <= held["STORAGE"] <= held["GPU"]
    engine.close()
    again = small_engine(tiny_model, kv_events=True, block_tokens=16, tiers=tiers)
    again._residence.tiers.flush()
    assert added_up(again) == {"GPU": set(), "CPU": set(), "STORAGE": held["STORAGE"]}
    again.update_weights("2", str(tiny_model))
    assert again.events_since(0)[-1][1].events == (AllBlocksCleared(),)
    again.close()


BLOCK_BYTES = 2 * 2 * 16 * 2 * 16 * 4  # of the tiny model's sixteen tokens


def added_up(engine: Engine) -> dict[str, set[bytes]]:
    """What is where, by all events so far."""
    held: dict[str, set[bytes]] = {"GPU": set(), "CPU": set(), "STORAGE": set()}
    for _, batch in engine.events_since(0):
        for event in batch.events:
            match event:
                case BlockStored():
                    assert bool(event.token_ids) == (event.medium == "GPU")
                    held[event.medium or ""] |= set(event.block_hashes)
                case BlockRemoved():
                    assert set(event.block_hashes) <= held[event.medium or ""]
                    held[event.medium or ""] -= set(event.block_hashes)
                case AllBlocksCleared():
                    held = {medium: set() for medium in held}
    return held


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


def test_weights_changed_alike_on_both_sides_take_each_others_hand_offs(
    tiny_model: Path, cpu_library: Path
) -> None:
    """By the digest of what they hold now; without one, or with another, they refuse each other."""
    digest = ContentDigest()
    digest.add("w", torch.arange(10))
    request = Request("r", prompt(50), NEW)
    expected = finish(small_engine(tiny_model), [request])["r"]
    for labels, digests, fits in (
        (("1", "1"), (digest.hex(), digest.hex()), True),
        (("1", "1"), ("", ""), False),
        (("1", "2"), (digest.hex(), digest.hex()), False),
        (("1", "1"), (digest.hex(), "0" * 32), False),
    ):
        prefill, decode = (small_engine(tiny_model, role=role) for role in ("prefill", "decode"))
        for engine, label, told in zip((prefill, decode), labels, digests, strict=True):
            engine.update_weights(label, digest=told)
        if fits:
            assert finish_disaggregated(prefill, decode, [request])["r"] == expected
            continue
        prefill.add(request)
        (handoff,) = prefill.step().handoffs
        with pytest.raises(BrokenHandoff, match="'model'"):
            decode.adopt(handoff)
