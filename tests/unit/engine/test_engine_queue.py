"""What waits is bounded: outputs that are still to come, forks, and requests that wait for the disk."""

import random
from pathlib import Path

import pytest
from engine_runs import drain, finish, small_engine
from tiny_gguf import TOKENS

from engine import Engine, Request, SamplingParams
from engine.errors import InvalidRequest, Overloaded

NEW = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(autouse=True)
def library(cpu_library: Path) -> None:
    """Engines here run the C operations."""


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(3, len(TOKENS)), k=length))


def in_queue(engine: Engine) -> int:
    return engine.statistics().scheduler.waiting


def test_outputs_that_are_still_to_come_take_their_places(tiny_model: Path) -> None:
    engine = small_engine(tiny_model, max_waiting=6, max_sequences=1)
    engine.add(Request("four", prompt(20), NEW, choices=4))
    with pytest.raises(Overloaded, match="4 requests are waiting, and 3 do not fit beside them"):
        engine.add(Request("three", prompt(20), NEW, choices=3))
    engine.add(Request("two", prompt(20), NEW, choices=2))
    with pytest.raises(Overloaded, match="6 requests are waiting"):
        engine.add(Request("one", prompt(20), NEW))
    while engine.has_work:
        engine.step()
        engine.check_integrity()
        assert in_queue(engine) <= 6
    engine.add(Request("six", prompt(20), NEW, choices=6))
    drain_choices(engine)


def drain_choices(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
        engine.check_integrity()


def test_more_outputs_than_the_queue_holds_are_refused_for_good(tiny_model: Path) -> None:
    engine = small_engine(tiny_model, max_waiting=3)
    with pytest.raises(InvalidRequest, match="n is 4; no more than max_waiting, 3") as refused:
        engine.add(Request("r", prompt(20), NEW, choices=4))
    assert refused.value.parameter == "n"
    assert not engine.has_work


@pytest.mark.parametrize("when", ["waiting", "running", "branched"])
def test_an_aborted_request_gives_up_the_places_of_its_outputs(tiny_model: Path, when: str) -> None:
    engine = small_engine(tiny_model, max_waiting=4, max_sequences=2, token_budget=16)
    engine.add(Request("r", prompt(40), NEW, choices=4))
    for _ in range({"waiting": 0, "running": 1, "branched": 4}[when]):
        engine.step()
    assert engine.abort("r")
    engine.check_integrity()
    engine.add(Request("again", prompt(40), NEW, choices=4))
    drain_choices(engine)


def test_a_fork_that_would_wait_beyond_the_bound_is_refused_and_one_that_runs_is_not(
    tiny_model: Path,
) -> None:
    engine = small_engine(tiny_model, max_waiting=1, max_sequences=2)
    engine.add(Request("r", prompt(20), NEW))
    engine.step()
    engine.add(Request("other", prompt(20, 1), NEW))
    engine.fork("r", "fork")  # there is a slot for it
    with pytest.raises(Overloaded, match="1 requests are waiting"):
        engine.fork("r", "more")
    assert engine.requests == {"r", "other", "fork"}
    outputs, _ = drain(engine)
    assert len(outputs["fork"]) == 5


def test_a_prefill_worker_keeps_no_place_for_what_it_hands_over(tiny_model: Path) -> None:
    engine = small_engine(tiny_model, role="prefill", max_waiting=2)
    engine.add(Request("r", prompt(20), NEW, choices=5))
    engine.add(Request("s", prompt(20), NEW, choices=5))
    assert len(engine.step().handoffs) == 10
    engine.check_integrity()
    assert not engine.has_work


class HandClock:
    """Each look is a millisecond after the one before."""

    def __init__(self) -> None:
        self.ns = 1

    def now_ns(self) -> int:
        self.ns += 1_000_000
        return self.ns


@pytest.mark.parametrize("role", ["both", "prefill", "decode"])
@pytest.mark.parametrize("ends", ["finished", "aborted", "withdrawn"])
def test_a_queue_that_keeps_moving_asks_nobody_to_wait_longer_each_time(
    tiny_model: Path, role: str, ends: str
) -> None:
    """Whether its requests end here, go on elsewhere, or are given up."""
    config = small_engine(tiny_model, role=role, max_waiting=2).config
    engine, prefill = Engine(config, HandClock()), small_engine(tiny_model, role="prefill")
    longest = 0.0
    for turn in range(30):
        for number in range(6):
            request = Request(f"{turn}/{number}", prompt(8, number), NEW)
            try:
                if role == "decode":
                    prefill.add(request)
                    engine.adopt(prefill.step().handoffs[0])
                else:
                    engine.add(request)
            except Overloaded as refused:
                longest = max(longest, refused.retry_after_s)
        if ends != "withdrawn":
            engine.step()
        if ends != "finished":
            for request_id in engine.requests:
                engine.abort(request_id)
        drain_choices(engine)
    assert 0.0 < longest <= 4.0


def test_weights_of_one_digest_take_each_others_hand_offs_and_files(tiny_model: Path, tmp_path: Path) -> None:
    tiers = {"host_bytes": 8 << 20, "disk_path": str(tmp_path)}
    prefill = small_engine(tiny_model, role="prefill", tiers=tiers)
    decode = small_engine(tiny_model, role="decode")
    both = small_engine(tiny_model, tiers=tiers)
    for engine in (prefill, decode, both):
        engine.update_weights("1", digest="0123456789abcdef")
    assert prefill.fingerprint == decode.fingerprint == both.fingerprint
    prefill.add(Request("r", prompt(50), NEW))
    (handoff,) = prefill.step().handoffs
    decode.adopt(handoff)
    outputs, _ = drain(decode)
    prefill.close()
    both.step()
    expected = finish(small_engine(tiny_model), [Request("r", prompt(50), NEW)])["r"]
    assert outputs["r"] == expected[1:]
    assert finish(both, [Request("r", prompt(50), NEW)])["r"] == expected
    both.close()
    decode.update_weights("2", digest="f" * 64)
    assert decode.fingerprint != both.fingerprint


@pytest.mark.parametrize("digest", ["abc", "g" * 16, "A" * 16, "a" * 129])
def test_a_digest_that_is_none_is_refused(tiny_model: Path, digest: str) -> None:
    engine = small_engine(tiny_model)
    before = engine.fingerprint
    with pytest.raises(InvalidRequest, match="hexadecimal") as refused:
        engine.update_weights("1", digest=digest)
    assert (refused.value.parameter, engine.fingerprint) == ("digest", before)
    engine.update_weights("1")
