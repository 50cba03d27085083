"""Chunked, incremental, batched, resumed and moved runs of V4 give the bits of the full pass."""

from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_v4 import QUANTISED, WIDTHS, RandomTensors, ids_of, run_chunks, tiny_config, tiny_model

from engine.errors import InvalidRequest
from engine.model.deepseek.replay import resume_after_hit
from engine.model.deepseek.rows import SequenceRows
from engine.model.deepseek.sequence_state import (
    StateSpan,
    copy_block,
    copy_slot,
    export_state,
    import_state,
    layout,
)
from engine.model.deepseek_v4.model import DeepseekV4Model
from kernels.operations import select_operations

COUNT = 90


RUNS = [
    *(("auto", name, "in one call", "exact") for name in QUANTISED),
    ("auto", "released", "composed", "exact"),
    ("auto", "off", "composed", "exact"),
    ("torch", "off", "in one call", "exact"),
    ("auto", "released", "in one call", "fast"),
    ("auto", "off", "composed", "fast"),
]


@pytest.fixture(scope="module", params=RUNS, ids="-".join)
def model(request, cpu_library):
    kind, quantised, widths, profile = request.param
    return tiny_model(tiny_config(QUANTISED[quantised], **WIDTHS[widths]), kind, profile)


@lru_cache
def _full(model, ids):
    return model.logits(list(ids))


@pytest.mark.parametrize("chunk", [1, 7, 32])
def test_chunks_give_the_bits_of_the_full_pass(model, chunk):
    ids = ids_of(COUNT)
    assert torch.equal(model.head(run_chunks(model, ids, chunk)), _full(model, tuple(ids)))


@pytest.mark.parametrize("block_tokens", [8, 64])
def test_block_size_changes_no_bit(model, block_tokens):
    ids = ids_of(40)
    found = model.head(run_chunks(model, ids, 9, block_tokens=block_tokens))
    assert torch.equal(found, _full(model, tuple(ids)))


@given(cuts=st.lists(st.integers(1, 20), min_size=1, max_size=12), seed=st.integers(0, 99))
@settings(max_examples=8, deadline=None)
def test_any_chunks_give_the_same_bits(cpu_library, cuts, seed):
    model, ids = tiny_model(tiny_config(**WIDTHS["in one call"])), ids_of(sum(cuts), seed)
    num_blocks = -(-len(ids) // 8)
    cache, at, parts = model.new_cache(num_blocks, 8, 1), 0, []
    for count in cuts:
        rows = SequenceRows(0, range(num_blocks), at, count)
        parts.append(model.forward(torch.tensor(ids[at : at + count]), [rows], cache))
        at += count
    assert torch.equal(model.head(torch.cat(parts)), model.logits(ids))


def test_many_entries_go_over_more_than_one_tile(cpu_library):
    """HCA sums over tiles of 64 entries: at ratio 2 the second one begins at position 128."""
    model = tiny_model(
        tiny_config(compress_ratios=[2, 4, 2], num_hidden_layers=3, num_nextn_predict_layers=0)
    )
    ids = ids_of(300)
    full = model.head(run_chunks(model, ids, 300))
    assert torch.equal(model.head(run_chunks(model, ids, 111)), full)
    cache = model.new_cache(19, 16, 1)
    rows = [SequenceRows(0, range(19), 0, 290)]
    model.forward(torch.tensor(ids[:290]), rows, cache)
    assert torch.equal(model.head(run_chunks(model, ids, 1, start=290, cache=cache)), full[290:])


@pytest.mark.parametrize(("csa", "hca"), [(1, 1), (3, 5), (16, 2)])
def test_any_rates_give_the_same_bits_in_any_chunks(cpu_library, csa, hca):
    """Also groups of one token, and overlapping groups as long as the window."""
    names = ["compressed_sparse_attention", "heavily_compressed_attention"]
    rates = dict(zip(names, (csa, hca), strict=True))
    config = tiny_config(layer_types=[*names, *names, "sliding_attention"], compress_rates=rates)
    model, ids, block = tiny_model(config), ids_of(70), 16 * csa * hca
    full = model.logits(ids)
    for chunk in (1, 13):
        assert torch.equal(model.head(run_chunks(model, ids, chunk, block_tokens=block)), full)


def test_sequences_in_one_step_leave_each_other_alone(model):
    """Prompt chunks of several lengths beside single rows, scattered blocks and slots."""
    ids = ids_of(COUNT)
    texts = {0: ids, 1: ids[::-1][:71], 2: ids[5:38], 3: ids[3:4]}
    chunks = {0: 13, 1: 1, 2: 5, 3: 1}
    blocks = {k: list(range(50 - 11 * k, 39 - 11 * k, -1)) for k in texts}
    cache, done, parts = model.new_cache(51, 16, 9), dict.fromkeys(texts, 0), {k: [] for k in texts}
    while any(done[k] < len(texts[k]) for k in texts):
        rows, step_ids = [], []
        for k, text in texts.items():
            count = min(chunks[k], len(text) - done[k])
            if count:
                rows.append(SequenceRows(2 * k, blocks[k], done[k], count))
                step_ids += text[done[k] : done[k] + count]
        hidden, start = model.head(model.forward(torch.tensor(step_ids), rows, cache)), 0
        for row in rows:
            parts[row.slot // 2].append(hidden[start : start + row.count])
            start, done[row.slot // 2] = start + row.count, row.stop
    for k, text in texts.items():
        assert torch.equal(torch.cat(parts[k]), _full(model, tuple(text))), k


@pytest.mark.parametrize("rows", [2, 17, 512])
def test_decode_rows_of_many_sequences_have_the_bits_that_each_has_alone(model, rows):
    """Behind pasts of several lengths, so that there are entries to select and more tiles than one row's."""
    lengths, blocks = (61, 33, 5), 8
    cache = model.new_cache(rows * blocks, 8, rows)
    tables = [range(s * blocks, (s + 1) * blocks) for s in range(rows)]
    for s in range(rows):
        first = s % len(lengths)
        if s == first:
            past = SequenceRows(s, tables[s], 0, lengths[s])
            model.forward(torch.tensor(ids_of(lengths[s], s)), [past], cache)
            continue
        copy_slot(cache, first, s)
        for source, target in zip(tables[first], tables[s], strict=True):
            copy_block(cache, source, target)
    ids = torch.arange(rows) % 128
    step = [SequenceRows(s, tables[s], lengths[s % len(lengths)], 1) for s in range(rows)]
    together = model.forward(ids, step, cache)
    for s in {0, 1, rows // 2, rows - 1}:
        assert torch.equal(model.forward(ids[s : s + 1], step[s : s + 1], cache)[0], together[s]), s


def test_a_used_slot_and_used_blocks_are_as_good_as_new(model):
    ids = ids_of(60)
    cache = model.new_cache(4, 16, 1)
    for text in (ids[::-1], ids):
        hidden = model.forward(torch.tensor(text), [SequenceRows(0, range(4), 0, 60)], cache)
    assert torch.equal(model.head(hidden), _full(model, tuple(ids)))


def test_rejected_rows_are_rolled_back_by_writing_over_them(model):
    """As a verification of drafts does: up to 8 rows beyond those that stay."""
    ids = ids_of(60)
    cache, start, parts = model.new_cache(5, 16, 1), 0, []
    for count in (17, 1, 3, 9, 2, 11, 17):
        wrong = [(i + 7) % 128 for i in ids[start : start + 8]]
        model.forward(torch.tensor(wrong), [SequenceRows(0, range(5), start, len(wrong))], cache)
        part = ids[start : start + count]
        parts.append(model.forward(torch.tensor(part), [SequenceRows(0, range(5), start, count)], cache))
        start += count
    assert torch.equal(model.head(torch.cat(parts)), _full(model, tuple(ids)))


@pytest.mark.parametrize("stop", [1, 3, 21, 40])
def test_an_exported_state_goes_on_elsewhere(model, stop):
    ids = ids_of(60)
    first, second = model.new_cache(4, 16, 1), model.new_cache(9, 16, 3)
    model.forward(torch.tensor(ids[:stop]), [SequenceRows(0, range(4), 0, stop)], first)
    source, target = StateSpan(0, range(4), stop), StateSpan(2, (8, 3, 5, 1), stop)
    payload = export_state(first, source)
    assert payload.nbytes == sum(rows * size for _, rows, size in layout(first, source))
    assert layout(first, source) == layout(second, target)
    import_state(second, target, payload)
    assert (export_state(second, target) == payload).all()
    rest = [SequenceRows(2, (8, 3, 5, 1), stop, 60 - stop)]
    hidden = model.forward(torch.tensor(ids[stop:]), rest, second)
    assert torch.equal(model.head(hidden), _full(model, tuple(ids))[stop:])


def test_a_resumed_sequence_writes_no_global_entry_again_and_any_chunks_agree(model):
    """Behind a prefix of 48 cached positions, of which the last window runs again."""
    ids = ids_of(COUNT)
    resume = resume_after_hit(48, 16)
    found = []
    for chunk in (1, 11, 64):
        cache = model.new_cache(6, 16, 1)
        run_chunks(model, ids[:48], 48, cache=cache)
        before = {i: source.main[: 48 // source.ratio].clone() for i, source in cache.sources.items()}
        bounds = {"window_from": resume.window_from, "write_from": resume.write_from}
        found.append(run_chunks(model, ids, chunk, start=resume.start, cache=cache, **bounds))
        assert all(
            torch.equal(source.main[: 48 // source.ratio], before[i]) for i, source in cache.sources.items()
        )
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_two_threads_give_the_bits_of_one(cpu_library):
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            model = DeepseekV4Model(tiny_config(), RandomTensors(), select_operations(threads))
            found += [model.head(run_chunks(model, ids_of(COUNT), chunk)) for chunk in (1, COUNT)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], more) for more in found[1:])


def test_only_the_last_position_where_that_is_asked(model):
    ids = ids_of(40)
    assert torch.equal(model.logits(ids, last_only=True), _full(model, tuple(ids))[-1])


def test_the_cache_refuses_blocks_that_cut_groups():
    with pytest.raises(InvalidRequest, match=r"block_tokens is 12, .* of the ratios \[4, 8\]"):
        tiny_model().new_cache(4, 12, 1)
