"""A whole step of many sequences, each with a past: entries, selections and candidates of its own."""

from functools import lru_cache

import pytest
import torch
from golden_sets import Recorder, golden_config, golden_ids, golden_model

from engine.model.deepseek.rows import SequenceRows
from engine.model.deepseek.sequence_state import copy_block, copy_slot

ROWS = (2, 3, 7, 8, 15, 16, 17, 64, 512)
LENGTHS = (61, 33, 47, 5, 62)  # of prompts: windows of 8, 8 selected groups, 5 candidate blocks of 4
BLOCK, BLOCKS = 16, 4  # of a sequence
KINDS = (("auto", "exact"), ("torch", "exact"), ("auto", "fast"), ("torch", "fast"))


@lru_cache
def _model(kind: str, profile: str):
    return golden_model("a", kind=kind, profile=profile)


def _with_pasts(model, rows):
    """A cache in which slot s holds the first of LENGTHS[s % 5] positions, and those lengths."""
    cache = model.new_cache(rows * BLOCKS, BLOCK, rows)
    lengths = [LENGTHS[s % len(LENGTHS)] for s in range(rows)]
    for s, length in enumerate(lengths):
        first = s % len(LENGTHS)
        if s == first:
            ids = torch.tensor(golden_ids("a"))[s : s + length]
            model.forward(ids, [SequenceRows(s, _blocks(s), 0, length)], cache)
            continue
        copy_slot(cache, first, s)
        for source, target in zip(_blocks(first), _blocks(s), strict=True):
            copy_block(cache, source, target)
    return cache, lengths


def _blocks(sequence):
    return range(sequence * BLOCKS, (sequence + 1) * BLOCKS)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("kind", "profile"), KINDS)
def test_each_sequence_has_the_bits_that_it_has_alone(rows, kind, profile, cpu_library):
    """Decode rows of up to 512 sequences in one step, each of a token of its own, against some alone."""
    model = _model(kind, profile)
    cache, lengths = _with_pasts(model, rows)
    ids = torch.arange(rows) % 290 + 4
    next_rows = [SequenceRows(s, _blocks(s), length, 1) for s, length in enumerate(lengths)]
    seen = Recorder()
    together = model.forward(ids, next_rows, cache, seen)
    for s in {0, 1, rows // 2, rows - 1}:
        alone = Recorder()
        assert torch.equal(model.forward(ids[s : s + 1], next_rows[s : s + 1], cache, alone)[0], together[s])
        for layer, (groups,) in alone.groups.items():
            assert torch.equal(groups[0], seen.groups[layer][0][s])


def test_pasts_are_long_enough_to_be_selected_from(cpu_library):
    """Each index source leaves groups out, and candidate blocks too; different ones for different rows."""
    model, config, seen = _model("auto", "exact"), golden_config("a"), Recorder()
    cache, lengths = _with_pasts(model, 5)
    rows = [SequenceRows(s, _blocks(s), length, 1) for s, length in enumerate(lengths)]
    model.forward(torch.arange(5) + 4, rows, cache, seen)
    for layer, (groups,) in seen.groups.items():
        assert bool((groups[0] >= 0).all())
        assert lengths[0] // config.ratio(layer) > config.index_topk
        assert groups[0].tolist() != groups[4].tolist()
    assert len(seen.blocks[6]) == 4  # all but that of 5 positions
    assert lengths[0] // config.candidate_block_size > config.candidate_topk_blocks
