"""Behind a cached prefix come the bits of a whole pass where windows are kept, else those of its lineage."""

import json
from pathlib import Path

import pytest
from engine_runs import Outputs, drain, finish, small_engine

from engine import Engine, Request, SamplingParams
from engine.model_path import model_path
from engine.scheduler.prefix import extend_chain

GOLDEN = Path(__file__).parents[2] / "data" / "v41_golden"
IDS: dict[str, list[int]] = {
    name: json.loads((GOLDEN / name / "ids.json").read_text()) * 2 for name in ("a", "b")
}
NEW = SamplingParams(max_tokens=8, ignore_eos=True)
FORGETFUL = {"tiers": {"window_bytes": 0}}


@pytest.fixture(params=["a", "b"])
def golden(request: pytest.FixtureRequest, cpu_library: Path) -> str:
    return request.param


def engine_of(golden: str, **settings: object) -> Engine:
    return small_engine(GOLDEN / golden, **{"kv_cache_bytes": 1 << 20, **settings})


def turn(golden: str, length: int, name: str = "turn") -> Request:
    return Request(name, tuple(IDS[golden][:length]), NEW)


def cold(golden: str, request: Request, **settings: object) -> Outputs:
    return finish(engine_of(golden, **settings), [request])


@pytest.mark.parametrize("replay", [True, False])
def test_turns_of_a_conversation_equal_cold_ones_while_windows_are_kept(golden: str, replay: bool) -> None:
    engine = engine_of(golden, replay=replay)
    for number, length in enumerate((64, 80, 81, 100, 100)):
        request = turn(golden, length)
        engine.add(request)
        cached = [output.num_cached for output in engine.step().tokens]
        outputs = finish(engine_of(golden, replay=replay), [request])["turn"]
        rest, _ = drain(engine)
        assert rest["turn"] == outputs[-len(rest["turn"]) :], f"turn {number}"
        assert all(count > 0 for count in cached) or number == 0
    counts = engine.statistics().scheduler
    assert (counts.exact_resumes, counts.replayed_resumes) == (4, 0)


def test_blocks_behind_resumed_windows_are_told_from_those_of_a_whole_pass(golden: str) -> None:
    """They are not bit-equal, so whoever finds them must know; a whole pass over the same tokens does not."""
    engine = engine_of(golden, **FORGETFUL)
    finish(engine, [turn(golden, 64)])
    engine.add(turn(golden, 100))
    (chunk,) = engine.step().tokens
    assert chunk.resumed == (64,)
    (sequence,) = engine._scheduler.running
    whole = sequence.fork(1)
    whole.chain, whole.resumed = [], ()
    exact = extend_chain(whole, engine._scheduler._root(sequence), 16, 6)
    assert sequence.chain[:4] == exact[:4]
    assert not set(sequence.chain[4:6]) & set(exact[4:6])
    assert [engine.pool.knows(key) for key in exact] == [True] * 4 + [False] * 2
    drain(engine)
    finish(engine, [turn(golden, 64, "again")])
    assert cold(golden, turn(golden, 64, "again")) == finish(engine_of(golden), [turn(golden, 64, "again")])


def test_a_lineage_of_two_places_is_gone_through_again_when_all_is_gone(golden: str) -> None:
    """A stream whose worker is lost goes on at one without a known block, to the same tokens."""
    engine = engine_of(golden, **FORGETFUL)
    for length in (32, 96):
        finish(engine, [turn(golden, length)])
    engine.add(turn(golden, 110))
    (first,) = engine.step().tokens
    assert first.resumed == (32, 96)
    expected, _ = drain(engine)
    for budget in (256, 13):
        fresh = engine_of(golden, token_budget=budget, **FORGETFUL)
        moved = Request(
            "moved", tuple(IDS[golden][:110]), NEW, generated_ids=first.token_ids, resumed=first.resumed
        )
        outputs = finish(fresh, [moved])
        assert outputs["moved"] == expected["turn"]
        assert fresh.statistics().scheduler.rebuilt == 1


def test_a_fork_right_behind_a_rebuild_has_its_parents_tokens(cpu_library: Path) -> None:
    """The parent's slot has what it goes on from by the next step alone: the copy hashed ids of other places
    (Engram)."""
    sampling = SamplingParams(max_tokens=6, ignore_eos=True, temperature=1.0, seed=3)
    settings = {"kv_cache_bytes": 4 << 20, **FORGETFUL}
    ids, engine = tuple((IDS["a"] * 4)[:142]), small_engine(model_path("nano"), **settings)
    finish(engine, [Request("turn", ids[:128], sampling)])
    engine.add(Request("turn", ids, sampling))
    (first,) = engine.step().tokens
    expected = drain(engine)[0]["turn"]
    fresh = small_engine(model_path("nano"), token_budget=13, **settings)
    moved = Request("moved", ids, sampling, generated_ids=first.token_ids, resumed=first.resumed)
    fresh.add(moved)
    fresh.step()
    (sequence,) = fresh._scheduler.running
    fresh.fork("moved", "early")
    while sequence.rebuilding:
        fresh.step()
    assert sequence.num_missing > 1
    fresh.fork("moved", "kid")
    assert drain(fresh)[0] == dict.fromkeys(("moved", "early", "kid"), expected)


def test_without_replay_a_prefix_without_windows_is_computed_again(golden: str) -> None:
    engine = engine_of(golden, replay=False, **FORGETFUL)
    finish(engine, [turn(golden, 64)])
    rows = engine.statistics().rows
    assert finish(engine, [turn(golden, 80)]) == cold(golden, turn(golden, 80), replay=False)
    assert engine.statistics().rows - rows == 80 + 7
    assert engine.statistics().scheduler.replayed_resumes == 0


def test_tenants_share_no_prefix(golden: str) -> None:
    engine = engine_of(golden)
    finish(engine, [turn(golden, 64)])
    for salt, shared in (("other", False), ("", True)):
        engine.add(Request("r", tuple(IDS[golden][:70]), NEW, cache_salt=salt))
        engine.step()
        (sequence,) = engine._scheduler.running
        assert (sequence.num_cached > 0) == shared
        drain(engine)
