"""The profile `fast` on the real model: the same bits on every path, and near to float32."""

from pathlib import Path

import pytest
import torch
from engine_runs import finish, finish_disaggregated, small_engine
from smollm2_prompts import QUESTIONS, chat_ids
from torch import Tensor

from bench.llama_cpp_peer import LlamaCpp
from engine import Engine, Request, SamplingParams, load_model
from engine.chat.template import ChatTemplate
from engine.chat.tokenizer import ChatTokenizer
from engine.model.llama import LlamaModel
from kernels.operations import Rows

BLOCK = 16


@pytest.fixture(scope="module")
def fast(smollm2_file: Path) -> LlamaModel:
    return load_model("smollm2", threads=1, operations="c", profile="fast")


@pytest.fixture(scope="module")
def prompts(tokenizer: ChatTokenizer, template: ChatTemplate) -> list[list[int]]:
    return [chat_ids(template, tokenizer, question) for question in QUESTIONS]


def rows_of(sequences: list[tuple[int, Tensor]], width: int) -> Rows:
    """Positions of numbered sequences, each with `width` blocks of its own."""
    numbers = torch.cat([torch.full_like(positions, number) for number, positions in sequences])
    count = 1 + int(numbers.max())
    tables = torch.arange(count * width, dtype=torch.int32).flip(0).view(count, width)
    return Rows(torch.cat([positions for _, positions in sequences]), numbers, tables)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_give_the_bits_of_one_forward(fast: LlamaModel, prompts: list[list[int]], chunk: int) -> None:
    ids = torch.tensor(prompts[2])
    width = -(-len(ids) // BLOCK)
    cache = torch.full(fast.cache_shape(width, BLOCK), torch.nan)
    parts = [
        fast.head(fast.forward(ids[positions], rows_of([(0, positions.clone())], width), cache))
        for positions in torch.arange(len(ids)).split(chunk)
    ]
    assert torch.equal(torch.cat(parts), fast.logits(ids.tolist()))


@pytest.mark.parametrize("count", [2, 3, 8])
def test_sequences_of_one_batch_do_not_know_each_other(
    fast: LlamaModel, prompts: list[list[int]], count: int
) -> None:
    """Prefills of different lengths in one step, then a step of one token each."""
    chosen = prompts[:count]
    width = max(len(ids) for ids in chosen) // BLOCK + 1
    cache = torch.full(fast.cache_shape(count * width, BLOCK), torch.nan)
    for part in (slice(0, -1), slice(-1, None)):
        places = [(number, torch.arange(len(ids))[part]) for number, ids in enumerate(chosen)]
        tokens = torch.cat([torch.tensor(ids)[part] for ids in chosen])
        hidden = fast.forward(tokens, rows_of(places, width), cache)
    last = fast.head(hidden)
    for row, ids in zip(last, chosen, strict=True):
        assert torch.equal(row, fast.logits(ids, last_only=True))


def test_two_threads_give_the_same_bits(fast: LlamaModel, prompts: list[list[int]]) -> None:
    two = load_model("smollm2", threads=2, operations="c", profile="fast")
    assert torch.equal(two.logits(prompts[0]), fast.logits(prompts[0]))


def test_the_fallback_agrees(fast: LlamaModel, prompts: list[list[int]]) -> None:
    """Not to the last bit: sums of floats are rounded otherwise."""
    fallback = load_model("smollm2", threads=1, operations="torch", profile="fast")
    ours, theirs = (model.logits(prompts[0][:12]).log_softmax(1) for model in (fast, fallback))
    assert float((ours.exp() * (ours - theirs)).sum(1).mean()) < 1e-4


def test_engines_give_the_same_tokens_on_every_path(smollm2_file: Path, prompts: list[list[int]]) -> None:
    def engine(**settings: object) -> Engine:
        values = {"operations": "c", "profile": "fast", "kv_cache_bytes": 32 << 20}
        return small_engine(smollm2_file, **{**values, **settings})

    sampling = SamplingParams(max_tokens=8, temperature=0.8, top_p=0.9, seed=3, ignore_eos=True)
    requests = [Request(f"r{number}", tuple(ids), sampling) for number, ids in enumerate(prompts[:3])]
    alone = engine()
    expected = {key: ids for request in requests for key, ids in finish(alone, [request]).items()}
    assert finish(engine(token_budget=7, threads=2), requests) == expected
    assert finish(alone, requests) == expected  # from the prefix cache
    assert finish_disaggregated(engine(role="prefill"), engine(role="decode"), requests) == expected


def test_is_nearer_to_float32_than_llama_cpp(
    smollm2: LlamaModel, fast: LlamaModel, prompts: list[list[int]], peer: LlamaCpp
) -> None:
    """Fed with llama.cpp's greedy output, whose activations have 8 bits."""
    same: list[Tensor] = []
    divergences: list[Tensor] = []
    for prompt in prompts:
        theirs = list(peer.greedy(prompt, 32).token_ids)
        logits = [model.logits(prompt + theirs[:-1])[len(prompt) - 1 :] for model in (smollm2, fast)]
        exact, ours = (rows.log_softmax(1) for rows in logits)
        best = exact.argmax(1)
        same.append(torch.stack((ours.argmax(1) == best, torch.tensor(theirs) == best)))
        divergences.append((exact.exp() * (exact - ours)).sum(1))
    shares, divergence = torch.cat(same, 1).float().mean(1), float(torch.cat(divergences).mean())
    figures = f"top 1 of fast {shares[0]:.4f}, of llama.cpp {shares[1]:.4f}, KL {divergence:.5f} nats"
    # A position in a hundred is left to the luck of near ties, which differs from processor to processor.
    assert float(shares[0]) >= max(float(shares[1]), 0.99), figures
    assert abs(divergence) < 1e-4, figures
