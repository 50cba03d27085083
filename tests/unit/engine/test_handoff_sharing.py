"""Hand-offs of one prompt share its blocks on the decode worker, and so do those that are swapped back in."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_runs import KINDS, Make, drain, engines_of, finish, prompt

from engine import Engine, Request, SamplingParams
from engine.handoff import Handoff

SAMPLED = SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
Choices = dict[tuple[str, int], tuple[int, ...]]


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, tiny_model: Path, cpu_library: Path) -> Iterator[Make]:
    with engines_of(request.param, tiny_model) as made:
        yield made


def handed_over(prefill: Engine, request: Request) -> tuple[list[Handoff], Choices]:
    prefill.add(request)
    handoffs, first = list[Handoff](), Choices()
    while prefill.has_work:
        result = prefill.step()
        handoffs += result.handoffs
        for output in result.tokens:
            first[output.request_id, output.choice] = output.token_ids
    return handoffs, first


def run(engine: Engine, found: Choices) -> tuple[Choices, int]:
    """All tokens, and the most blocks that were held at once."""
    most = 0
    while engine.has_work:
        for output in engine.step().tokens:
            key = output.request_id, output.choice
            found[key] = found.get(key, ()) + output.token_ids
        engine.check_integrity()
        most = max(most, engine.statistics().pool.held)
    assert engine.statistics().pool.held == 0
    return found, most


def test_choices_share_the_full_blocks_of_their_prompt(make: Make) -> None:
    request = Request("r", prompt(70), SAMPLED, choices=4)
    both, decode, alone = make(), make(role="decode"), make(role="decode")
    both.add(request)
    expected, _ = run(both, {})
    handoffs, first = handed_over(make(role="prefill"), request)
    alone.adopt(handoffs[0])
    _, one = run(alone, {})
    for handoff in handoffs:
        decode.adopt(handoff)
    found, most = run(decode, first)
    assert found == expected
    full = 70 // decode.pool.block_tokens
    assert most <= full + 4 * (one - full)


def test_a_later_hand_off_takes_what_the_decode_worker_knows(make: Make) -> None:
    """While others read it, and behind their end."""
    requests = [
        Request(name, (*prompt(64), *prompt(20, seed)), SAMPLED) for seed, name in enumerate("abc", 1)
    ]
    expected = [finish(make(), [request])[request.id] for request in requests]
    prefill, decode = make(role="prefill"), make(role="decode")
    found = Choices()
    for request in requests:
        handoffs, first = handed_over(prefill, request)
        found.update(first)
        decode.adopt(handoffs[0])
        before = decode.statistics().pool.held
        for output in decode.step().tokens:
            found[output.request_id, 0] += output.token_ids
        gained = decode.statistics().pool.held - before
        assert request.id == "a" or gained < decode.pool.blocks_for(84)
    found, _ = run(decode, found)
    assert [found[request.id, 0] for request in requests] == expected


def test_requests_of_other_salts_share_nothing(make: Make) -> None:
    prefill, decode = make(role="prefill"), make(role="decode")
    for salt in ("one", "two"):
        (handoff,), _ = handed_over(prefill, Request(salt, prompt(70), SAMPLED, cache_salt=salt))
        decode.adopt(handoff)
    decode.step()
    assert decode.statistics().pool.held >= 2 * (70 // decode.pool.block_tokens)
    run(decode, {})


def test_what_came_with_a_hand_off_is_kept_in_host_memory(make: Make) -> None:
    prefill, decode = make(role="prefill"), make(role="decode", tiers={"host_bytes": 4 << 20})
    handoffs, _ = handed_over(prefill, Request("r", prompt(70), SAMPLED, choices=3))
    for handoff in handoffs:
        decode.adopt(handoff)
    decode.step()
    assert decode.statistics().tiers.blocks.entries == 70 // decode.pool.block_tokens
    run(decode, {})


def test_outputs_that_were_swapped_out_share_their_prompt_again(make: Make) -> None:
    request = Request("r", prompt(70), SAMPLED, priority=5, choices=3)
    plain = make()
    plain.add(request)
    expected, most_plain = run(plain, {})
    engine = make(preemption="swap", tiers={"host_bytes": 8 << 20}, max_sequences=3)
    engine.add(request)
    found = Choices()
    for _ in range(2):
        for output in engine.step().tokens:
            found[output.request_id, output.choice] = found.get((output.request_id, output.choice), ()) + (
                output.token_ids
            )
    for number in range(3):
        engine.add(Request(f"urgent{number}", prompt(20, number + 1), SAMPLED))
    found, most = run(engine, found)
    assert engine.statistics().scheduler.swapped >= 1
    assert {key: ids for key, ids in found.items() if key[0] == "r"} == expected
    urgent = 3 * engine.pool.blocks_for(20 + 12)
    assert most <= max(urgent, most_plain + 3)
    assert drain(engine) == ({}, {})
