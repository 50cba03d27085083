"""Memory of a long pass is bounded: nothing grows with the square of the length, whoever allocates it."""

import pytest

from bench.forward_memory import TINY, Verdict, run_pass
from bench.random_deepseek import config_json
from engine.model.deepseek.config import DeepseekConfig

MIB = 1 << 20
LENGTH = 6144


@pytest.fixture(scope="module")
def passes(cpu_library):
    """Of a length and of twice that, each in a process of its own."""
    return run_pass(LENGTH), run_pass(2 * LENGTH)


def test_twice_the_length_takes_no_more_than_twice_the_memory(passes):
    half, whole = passes
    assert whole.added_bytes <= 2.2 * half.added_bytes


def test_what_the_second_half_adds_is_less_than_a_tensor_of_length_times_length(passes):
    """Were it of single bytes alone: the second half of the rows would add 108 MiB."""
    half, whole = passes
    assert whole.added_bytes - half.added_bytes < ((2 * LENGTH) ** 2 - LENGTH**2) / 2


def test_the_peak_is_measured(passes):
    """More than the cache alone, which is there at the end of a pass."""
    for found in passes:
        assert found.added_bytes > found.cache_bytes > 0
        assert found.before_bytes > 50 * MIB  # PyTorch itself


def test_every_mechanism_takes_part():
    config = DeepseekConfig.from_dict(config_json(TINY))
    assert config.max_position_embeddings == 1 << 20
    assert config.engram_layer_ids
    assert config.candidate_source_layer_id >= 0
    assert config.candidate_topk_blocks * config.candidate_block_size < LENGTH
    assert config.index_topk < LENGTH
    assert (config.quantisation.main, config.quantisation.index, config.quantisation.window) == (True,) * 3


@pytest.mark.parametrize(("mib", "half_mib", "met"), [(200, 100, True), (221, 100, False), (300, 200, False)])
def test_the_verdict_is_of_growth_and_of_a_bound(mib, half_mib, met):
    found = Verdict("forward_memory", "MiB", mib, "half", half_mib, 2.2)
    assert found.met is met
