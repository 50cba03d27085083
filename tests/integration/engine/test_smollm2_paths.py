"""The real model gives the same tokens on every path through the engine, greedy and sampled."""

from pathlib import Path

import pytest
import torch
from engine_runs import Outputs, drain, finish, finish_disaggregated, small_engine
from smollm2_prompts import QUESTIONS, chat_ids

from engine import Engine, Request, SamplingParams
from engine.chat.template import ChatTemplate
from engine.chat.tokenizer import ChatTokenizer
from engine.model.llama import LlamaModel
from kernels.operations import Rows

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def requests(tokenizer: ChatTokenizer, template: ChatTemplate) -> list[Request]:
    """One greedy and one sampled request a question."""
    prompts = [tuple(chat_ids(template, tokenizer, question)) for question in QUESTIONS[:3]]
    kinds = {"greedy": GREEDY, "sampled": SAMPLED}
    return [Request(f"{kind}-{n}", p, kinds[kind]) for n, p in enumerate(prompts) for kind in kinds]


@pytest.fixture(scope="module")
def expected(smollm2_file: Path, requests: list[Request]) -> Outputs:
    """Each request alone, in one chunk, in an engine without a known prefix."""
    engine = engine_of(smollm2_file, block_tokens=512, kv_cache_bytes=32 << 20)
    return {key: ids for request in requests for key, ids in finish(engine, [request]).items()}


def engine_of(model: Path, **settings: object) -> Engine:
    return small_engine(model, **{"threads": 2, "operations": "c", "kv_cache_bytes": 32 << 20, **settings})


@pytest.mark.parametrize("chunk", [7, 64])
def test_chunks_give_the_bits_of_one_forward(
    smollm2: LlamaModel, requests: list[Request], chunk: int
) -> None:
    ids = torch.tensor(requests[-1].prompt_ids)
    blocks = torch.tensor([[3, 0, 4, 1, 5, 2]], dtype=torch.int32)
    cache = torch.full(smollm2.cache_shape(6, 16), torch.nan)
    parts: list[torch.Tensor] = []
    for positions in torch.arange(len(ids)).split(chunk):
        rows = Rows(positions.clone(), torch.zeros(len(positions), dtype=torch.int64), blocks)
        parts.append(smollm2.head(smollm2.forward(ids[positions], rows, cache)))
    assert torch.equal(torch.cat(parts), smollm2.logits(ids.tolist()))


@pytest.mark.parametrize("token_budget", [7, 64, 1024])
def test_batched_and_chunked(
    smollm2_file: Path, requests: list[Request], expected: Outputs, token_budget: int
) -> None:
    assert finish(engine_of(smollm2_file, token_budget=token_budget), requests) == expected


def test_one_thread(smollm2_file: Path, requests: list[Request], expected: Outputs) -> None:
    assert finish(engine_of(smollm2_file, threads=1), requests[:2]) == {
        request.id: expected[request.id] for request in requests[:2]
    }


def test_handed_over(smollm2_file: Path, requests: list[Request], expected: Outputs) -> None:
    prefill, decode = engine_of(smollm2_file, role="prefill"), engine_of(smollm2_file, role="decode")
    assert finish_disaggregated(prefill, decode, requests) == expected
    assert decode.statistics().rows == sum(len(ids) - 1 for ids in expected.values())


def test_from_the_prefix_cache(smollm2_file: Path, requests: list[Request], expected: Outputs) -> None:
    engine = engine_of(smollm2_file)
    finish(engine, requests)
    rows = engine.statistics().rows
    assert finish(engine, requests) == expected
    saved = sum((len(request.prompt_ids) - 1) // 16 * 16 for request in requests)
    computed = sum(len(request.prompt_ids) + 11 for request in requests) - saved
    assert engine.statistics().rows - rows == computed


def test_preempted_and_recomputed(smollm2_file: Path, requests: list[Request], expected: Outputs) -> None:
    blocks = max(len(request.prompt_ids) + 12 for request in requests) // 16 + 3
    crowded = engine_of(smollm2_file, kv_cache_bytes=blocks * 16 * 46080, token_budget=64)
    outputs: Outputs = {}
    for request in requests:
        crowded.add(request)
    outputs, reasons = drain(crowded)
    assert outputs == expected
    assert set(reasons.values()) == {"length"}
    assert crowded.statistics().scheduler.preemptions > 0
