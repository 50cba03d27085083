"""Multiply-adds of a prompt against a count by hand, and a pair of runs on a small model."""

from dataclasses import replace

import pytest
import torch
from test_random_deepseek import TINY
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from bench.ced_prefill import RANDOM, Length, Pair, flops, measure, models, pair, prefill, prompt
from bench.random_deepseek import config_json, random_model, write_folder
from engine.errors import UnknownModel
from engine.model.deepseek.config import DeepseekConfig
from engine.model.deepseek.replay import decoder_bound
from kernels.operations import Weight

CONFIG = DeepseekConfig.from_dict(config_json(TINY))


class Tally:
    """Operations that count the multiply-adds of their products."""

    fused = None  # all of it composed of products, which pass here

    def __init__(self, operations):
        self._operations, self.flops = operations, 0

    def __getattr__(self, name):
        return getattr(self._operations, name)

    def linear(self, x_MK, weights: list[Weight]):
        self.flops += sum(2 * x_MK.shape[0] * x_MK.shape[1] * weight.rows for weight in weights)
        return self._operations.linear(x_MK, weights)


@pytest.mark.parametrize("replay", [False, True])
def test_products_are_those_that_the_model_runs(replay):
    """Where every entry is chosen nothing is scored; attention is not among the operations' products."""
    raw = config_json(replace(TINY, selected=512, candidate_blocks=64))
    model = random_model(raw, 1)
    model.operations = tally = Tally(model.operations)
    tokens = 60
    bound = decoder_bound(0, tokens, TINY.window) if replay else 0
    prefill(model, prompt(model.config, tokens, 0), replay=replay)
    low = [p - max(p - TINY.window + 1, 0) + 1 for p in range(tokens)]

    def attended(layer):
        ratio = model.config.ratio(layer)
        lowest = bound if layer > 6 else 0
        rows = range(bound if layer >= 6 else 0, tokens)
        windows = (min(low[p], p - lowest + 1) for p in rows)
        return sum(windows) + sum((p + 1) // ratio for p in rows if ratio)

    attention = 4 * TINY.heads * TINY.head_channels * sum(map(attended, range(12)))
    assert flops(model.config, tokens, bound) - attention == tally.flops


def test_replay_saves_less_than_the_decoder():
    tokens = 4096
    bound = decoder_bound(0, tokens, TINY.window)
    ratio = flops(CONFIG, tokens, bound) / flops(CONFIG, tokens, 0)
    assert 0.2 < ratio < 0.6


def test_both_ways_leave_the_same_entries():
    model = random_model(config_json(TINY), 1)
    found = pair(model, prompt(model.config, 600, 1), 1)
    assert found.same_entries
    assert min(found.replay_s, found.full_s) > 0


def test_a_length_is_met_by_its_ratio_and_by_every_pair():
    good, bad = Pair(1.0, 2.0, True), Pair(1.0, 2.0, False)
    assert Length(8192, 0.5, 1, 2, (good, good)).met
    assert not Length(8192, 0.5, 1, 2, (good, bad)).met
    assert not Length(8192, 0.6, 1, 2, (good,)).met


def test_prompts_hold_no_image():
    config = replace(CONFIG, image_token_id=5)
    ids = prompt(config, 2000, 0)
    assert int(ids.max()) == config.vocab_size - 1
    assert not bool((ids == 5).any())
    assert torch.equal(ids, prompt(config, 2000, 0))


def test_folders_join_the_random_model_at_the_lengths_that_they_take(tmp_path):
    write_folder(tmp_path / "tiny", config_json(TINY))
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(TINY.vocabulary)}, "w0"))
    words.save(str(tmp_path / "tiny" / "tokenizer.json"))
    (first, _), (name, model) = models([str(tmp_path / "tiny")], 1)
    assert (first, name) == (RANDOM, str(tmp_path / "tiny"))
    found = measure(name, model, {100: 2, 2 * TINY.positions: 1})
    assert [(length.tokens, len(length.pairs)) for length in found] == [(100, 2)]


def test_a_model_without_an_encoder_is_refused():
    with pytest.raises(UnknownModel, match="not a DeepSeek"):
        list(models(["smollm2"], 1))
