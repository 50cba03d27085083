"""Random V4.1 models: of about the size that they say, whole, and the same from memory and from a folder."""

from dataclasses import replace

import pytest
import torch

from bench.random_deepseek import (
    Size,
    active_parameters,
    compressed_ids,
    config_json,
    random_model,
    write_folder,
)
from engine.checkpoint.source import open_checkpoint
from engine.model.deepseek.config import DeepseekConfig
from engine.model.deepseek.model import DeepseekModel
from kernels.operations import select_operations

TINY = Size(
    vocabulary=64, hidden=64, heads=4, head_channels=32, rope_channels=16, query_rank=32, output_groups=2,
    output_rank=32, inner=32, experts=4, experts_per_token=2, window=8, selected=4, candidate_blocks=2,
    engram_rows_a_head=32, engram_heads=2, positions=1024,
)  # fmt: skip


def test_the_size_by_default_uses_about_fifty_million_parameters_a_token():
    config = DeepseekConfig.from_dict(config_json(Size()))
    assert active_parameters(config) == pytest.approx(50e6, rel=0.05)


def test_experts_that_a_token_is_not_sent_to_are_not_active():
    def active(**fields):
        return active_parameters(DeepseekConfig.from_dict(config_json(replace(TINY, **fields))))

    routers = 12 * 4 * (TINY.hidden + 2)  # a row and two biases an expert
    assert active(experts=8) - active() == routers
    assert active(experts_per_token=3) - active() == 12 * 3 * TINY.hidden * TINY.inner


def test_a_folder_holds_a_model_that_runs(tmp_path):
    raw = config_json(TINY)
    table_bytes = write_folder(tmp_path / "model", raw)
    source = open_checkpoint(tmp_path / "model")
    config = source.family.config
    assert isinstance(config, DeepseekConfig)
    assert table_bytes == sum(config.engram_num_embeddings) * (TINY.engram_channels + 1)
    model = DeepseekModel(config, source, select_operations(1), compressed_ids(config))
    source.check_all_taken()
    assert model.logits(list(range(20))).isfinite().all()


def test_logits_in_memory_are_of_a_moderate_size():
    logits = random_model(config_json(TINY), 1).logits(list(range(40)))
    assert 0.1 < float(logits.std()) < 10
    assert not torch.equal(logits[-1], logits[-2])
