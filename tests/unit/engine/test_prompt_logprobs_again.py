"""Logprobs of a prompt that is known already, of forks, of ids that come again; and what they leave."""

from dataclasses import replace
from pathlib import Path

import pytest
from engine_runs import finish, small_engine
from tiny_gguf import TOKENS

from engine import Engine, Request, SamplingParams
from engine.errors import InvalidRequest
from protocol.sampling_reply import TokenLogprobs

PROMPT = tuple(3 + number % (len(TOKENS) - 3) for number in range(70))
PLAIN = SamplingParams(max_tokens=3, ignore_eos=True)
TELLING = replace(PLAIN, prompt_logprobs=1)


@pytest.fixture
def engine(tiny_model: Path, cpu_library: Path) -> Engine:
    return small_engine(tiny_model, token_budget=32)


def told(engine: Engine) -> dict[str, tuple[TokenLogprobs, ...]]:
    """By request, with a look at the books after each step."""
    found: dict[str, tuple[TokenLogprobs, ...]] = {}
    while engine.has_work:
        for output in engine.step().tokens:
            if output.prompt_logprobs:
                found[output.request_id] = output.prompt_logprobs
        engine.check_integrity()
    return found


def test_an_id_that_comes_again_is_told_the_same(engine: Engine) -> None:
    answers: list[tuple[TokenLogprobs, ...]] = []
    for _ in range(3):
        engine.add(Request("r", PROMPT, TELLING))
        answers.append(told(engine)["r"])
    assert len(answers[0]) == len(PROMPT) - 1
    assert answers[0] == answers[1] == answers[2]


def test_generate_tells_twice(engine: Engine) -> None:
    first, second = (engine.generate([PROMPT], replace(TELLING, max_tokens=2)) for _ in range(2))
    assert first == second


def test_what_it_computes_is_kept_once_and_found_by_others(tiny_model: Path, cpu_library: Path) -> None:
    engine = small_engine(tiny_model, tiers={"host_bytes": 1 << 20})
    for _ in range(3):
        finish(engine, [Request("r", PROMPT, TELLING)])
    statistics = engine.statistics()
    assert (
        statistics.pool.cached == statistics.tiers.blocks.entries == len(PROMPT) // engine.pool.block_tokens
    )
    engine.add(Request("plain", PROMPT, PLAIN))
    assert engine.step().tokens[0].num_cached == 64
    finish(engine)


@pytest.mark.parametrize("choices", [1, 3])
def test_it_is_told_whole_after_a_preemption(tiny_model: Path, cpu_library: Path, choices: int) -> None:
    engine = small_engine(tiny_model, token_budget=16, max_sequences=1)
    engine.add(Request("r", PROMPT, TELLING, priority=5, choices=choices))
    for _ in range(2):
        engine.step()
    engine.add(Request("urgent", PROMPT[:20], PLAIN))
    found = told(engine)
    assert engine.statistics().scheduler.preemptions > 0
    assert len(found["r"]) == len(PROMPT) - 1


def test_a_fork_during_the_prompt_tells_none_of_it(engine: Engine) -> None:
    engine.add(Request("parent", PROMPT, TELLING))
    engine.step()
    engine.fork("parent", "child")
    found = told(engine)
    assert set(found) == {"parent"}


@pytest.mark.parametrize("parent", [PLAIN, TELLING])
@pytest.mark.parametrize("steps", [1, 4])
def test_a_fork_that_asks_for_them_is_refused_by_name(
    engine: Engine, parent: SamplingParams, steps: int
) -> None:
    engine.add(Request("parent", PROMPT, parent))
    for _ in range(steps):
        engine.step()
    with pytest.raises(InvalidRequest) as refused:
        engine.fork("parent", "child", TELLING)
    assert refused.value.parameter == "prompt_logprobs"
    told(engine)
