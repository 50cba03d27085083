"""A request's tokens do not depend on its path: chunked, batched, handed over, cached or preempted."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_runs import Outputs, drain, finish, finish_disaggregated, small_engine
from tiny_gguf import TOKENS

from engine import Engine, Request, SamplingParams, load_model
from engine.model.llama import LlamaModel
from kernels.operations import Rows

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.95, top_k=50, seed=7, ignore_eos=True)


@pytest.fixture(params=["c", "torch"])
def operations(request: pytest.FixtureRequest, cpu_library: Path) -> str:
    return request.param


@pytest.fixture
def engine_of(tiny_model: Path, operations: str) -> Callable[..., Engine]:
    return lambda **settings: small_engine(tiny_model, operations=operations, **settings)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(3, len(TOKENS)), k=length))


def four_requests(sampling: SamplingParams) -> list[Request]:
    return [Request(f"r{n}", prompt(length, n), sampling) for n, length in enumerate((1, 16, 33, 90))]


def one_by_one(engine: Engine, requests: list[Request]) -> Outputs:
    return {key: ids for request in requests for key, ids in finish(engine, [request]).items()}


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_give_the_bits_of_one_forward(tiny_model: Path, operations: str, chunk: int) -> None:
    model = load_model(str(tiny_model), threads=1, operations=operations)
    ids = prompt(70)
    whole = paged_logits(model, ids, len(ids))
    assert torch.equal(paged_logits(model, ids, chunk), whole)
    plain = model.logits(ids)  # in blocks of another size
    assert torch.equal(plain, whole)
    assert torch.equal(model.logits(ids, last_only=True), plain[-1])


def paged_logits(model: LlamaModel, ids: tuple[int, ...], chunk: int) -> torch.Tensor:
    """All logits, computed chunk by chunk over scattered blocks of a cache that is NaN where nobody wrote."""
    blocks = torch.randperm(20)[:10].to(torch.int32)[None]
    cache = torch.full(model.cache_shape(20, 7), torch.nan)
    parts: list[torch.Tensor] = []
    for start in range(0, len(ids), chunk):
        positions = torch.arange(start, min(start + chunk, len(ids)))
        rows = Rows(positions, torch.zeros(len(positions), dtype=torch.int64), blocks)
        parts.append(model.head(model.forward(torch.tensor(ids)[positions], rows, cache)))
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("operations", "token_budget"), [("c", 2), ("c", 7), ("c", 64), ("torch", 7)], indirect=["operations"]
)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_batched_and_chunked_equals_alone(
    engine_of: Callable[..., Engine], token_budget: int, sampling: SamplingParams
) -> None:
    expected = one_by_one(engine_of(token_budget=512), four_requests(sampling))
    assert finish(engine_of(token_budget=token_budget), four_requests(sampling)) == expected


def test_greedy_is_the_most_likely_token_of_a_full_forward(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of()
    request = Request("r", prompt(20), GREEDY)
    ids = list(request.prompt_ids)
    for token in finish(engine, [request])["r"]:
        assert int(engine.model.logits(ids, last_only=True).argmax()) == token
        ids.append(token)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_handed_over_equals_monolithic(engine_of: Callable[..., Engine], sampling: SamplingParams) -> None:
    expected = finish(engine_of(), four_requests(sampling))
    prefill, decode = engine_of(role="prefill", token_budget=40), engine_of(role="decode", token_budget=5)
    assert finish_disaggregated(prefill, decode, four_requests(sampling)) == expected
    # Each request cost the decode engine its own rows alone: it computed no prompt again.
    assert decode.statistics().rows == 4 * (sampling.max_tokens - 1)


def test_a_decode_engine_of_another_block_size_adopts(engine_of: Callable[..., Engine]) -> None:
    expected = finish(engine_of(), four_requests(GREEDY))
    prefill, decode = engine_of(role="prefill"), engine_of(role="decode", block_tokens=5)
    assert finish_disaggregated(prefill, decode, four_requests(GREEDY)) == expected


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_prefix_hit_equals_a_miss(engine_of: Callable[..., Engine], sampling: SamplingParams) -> None:
    engine = engine_of()
    shared = prompt(48)
    first = Request("first", shared + prompt(9, 1), sampling)
    second = Request("second", shared + prompt(20, 2), sampling)
    expected = finish(engine_of(), [second])
    finish(engine, [first])
    rows = engine.statistics().rows
    engine.add(second)
    cached = [output.num_cached for output in engine.step().tokens]
    assert cached == [48]
    assert engine.statistics().rows - rows == 20
    outputs, _ = drain(engine)
    assert outputs["second"] == expected["second"][1:]


def test_a_whole_prompt_in_the_cache_still_computes_its_last_block(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of()
    requests = [Request(name, prompt(48), GREEDY) for name in ("first", "second")]
    one_by_one(engine, requests[:1])
    outputs = finish(engine, requests[1:])
    assert outputs["second"] == finish(engine_of(), requests[:1])["first"]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_preempted_and_recomputed_equals_undisturbed(tiny_model: Path, sampling: SamplingParams) -> None:
    requests = [Request(f"r{n}", prompt(330, n), sampling) for n in range(6)]
    expected = one_by_one(small_engine(tiny_model, operations="c"), requests)
    crowded = small_engine(tiny_model, operations="c", kv_cache_bytes=1 << 20)
    assert finish(crowded, requests) == expected
    assert crowded.statistics().scheduler.preemptions > 0


def test_a_decode_engine_preempts_and_recomputes_what_it_adopted(tiny_model: Path) -> None:
    requests = [Request(f"r{n}", prompt(330, n), GREEDY) for n in range(6)]
    expected = one_by_one(small_engine(tiny_model, operations="c"), requests)
    prefill = small_engine(tiny_model, operations="c", role="prefill")
    decode = small_engine(tiny_model, operations="c", role="decode", kv_cache_bytes=1 << 20)
    assert finish_disaggregated(prefill, decode, requests) == expected
    assert decode.statistics().scheduler.preemptions > 0


def test_forced_tokens_are_computed_and_leave_the_same_cache(engine_of: Callable[..., Engine]) -> None:
    chosen = finish(engine_of(), [Request("free", prompt(20), GREEDY)])["free"]
    engine = engine_of()
    forced = SamplingParams(forced_ids=chosen, max_tokens=1, temperature=1.0)
    assert finish(engine, [Request("forced", prompt(20), forced)])["forced"] == chosen
    going_on = Request("on", prompt(20) + chosen, GREEDY)
    assert finish(engine, [going_on]) == finish(engine_of(), [going_on])
