"""Chunked, incremental, batched and moved runs give the bits of the full pass."""

from functools import lru_cache

import pytest
import torch
from golden_sets import golden_config, golden_ids, golden_model, run_chunks

from engine.model.deepseek.cache import DeepseekCache
from engine.model.deepseek.config import Quantisation
from engine.model.deepseek.rows import SequenceRows
from engine.model.deepseek.sequence_state import StateSpan, export_state, import_state, layout

QUANTISED = {"on": Quantisation(), "off": Quantisation.off()}


RUNS = [
    ("a", "on", "auto", "exact"),
    ("a", "off", "auto", "exact"),
    ("b", "off", "auto", "exact"),
    ("a", "on", "auto", "fast"),
    ("b", "off", "auto", "fast"),
    ("a", "on", "torch", "exact"),
    ("a", "on", "torch", "fast"),
]


@pytest.fixture(scope="module", params=RUNS, ids="-".join)
def model(request, cpu_library):
    name, quantised, kind, profile = request.param
    config = golden_config(name, QUANTISED[quantised])
    return name, golden_model(name, config=config, kind=kind, profile=profile)


@lru_cache
def _full(model, ids):
    return model.logits(list(ids))


@pytest.mark.parametrize("chunk", [1, 7, 32, 1000])
def test_chunks_give_the_bits_of_the_full_pass(model, chunk):
    name, m = model
    ids = golden_ids(name)
    if chunk == 1:
        ids = ids[:50]
    assert torch.equal(m.head(run_chunks(m, ids, chunk)), _full(m, tuple(ids)))


@pytest.mark.parametrize("block_tokens", [2, 64])
def test_block_size_changes_no_bit(model, block_tokens):
    name, m = model
    ids = golden_ids(name)[:40]
    assert torch.equal(m.head(run_chunks(m, ids, 9, block_tokens=block_tokens)), _full(m, tuple(ids)))


def test_sequences_in_one_step_leave_each_other_alone(model):
    """Prompt chunks of several lengths beside single rows, scattered blocks and slots."""
    name, m = model
    ids = golden_ids(name)
    texts = {0: ids, 1: ids[::-1][:71], 2: ids[5:38], 3: ids[3:4]}
    chunks = {0: 13, 1: 1, 2: 5, 3: 1}
    blocks = {k: list(range(50 - 11 * k, 39 - 11 * k, -1)) for k in texts}
    cache, done, parts = m.new_cache(51, 16, 9), dict.fromkeys(texts, 0), {k: [] for k in texts}
    while any(done[k] < len(texts[k]) for k in texts):
        rows, step_ids = [], []
        for k, text in texts.items():
            count = min(chunks[k], len(text) - done[k])
            if count:
                rows.append(SequenceRows(2 * k, blocks[k], done[k], count))
                step_ids += text[done[k] : done[k] + count]
        hidden, start = m.head(m.forward(torch.tensor(step_ids), rows, cache)), 0
        for row in rows:
            parts[row.slot // 2].append(hidden[start : start + row.count])
            start, done[row.slot // 2] = start + row.count, row.stop
    for k, text in texts.items():
        assert torch.equal(torch.cat(parts[k]), _full(m, tuple(text))), k


def test_a_used_slot_and_used_blocks_are_as_good_as_new(model):
    name, m = model
    ids = golden_ids(name)[:60]
    cache = m.new_cache(4, 16, 1)
    for text in (ids[::-1], ids):
        hidden = m.forward(torch.tensor(text), [SequenceRows(0, range(4), 0, 60)], cache)
    assert torch.equal(m.head(hidden), _full(m, tuple(ids)))


def test_rejected_rows_are_rolled_back_by_writing_over_them(model):
    """As a verification of drafts does: up to 8 rows beyond those that stay."""
    name, m = model
    ids = golden_ids(name)[:60]
    cache, start, parts = m.new_cache(5, 16, 1), 0, []
    for count in (17, 1, 3, 9, 2, 11, 17):
        wrong = [(i + 7) % 200 + 5 for i in ids[start : start + 8]]
        m.forward(torch.tensor(wrong), [SequenceRows(0, range(5), start, len(wrong))], cache)
        part = ids[start : start + count]
        parts.append(m.forward(torch.tensor(part), [SequenceRows(0, range(5), start, count)], cache))
        start += count
    assert torch.equal(m.head(torch.cat(parts)), _full(m, tuple(ids)))


@pytest.mark.parametrize("stop", [1, 21, 40])
def test_an_exported_state_goes_on_elsewhere(model, stop):
    name, m = model
    ids = golden_ids(name)[:60]
    first, second = m.new_cache(4, 16, 1), m.new_cache(9, 16, 3)
    m.forward(torch.tensor(ids[:stop]), [SequenceRows(0, range(4), 0, stop)], first)
    source, target = StateSpan(0, range(4), stop), StateSpan(2, (8, 3, 5, 1), stop)
    payload = export_state(first, source)
    assert payload.nbytes == sum(rows * size for _, rows, size in layout(first, source))
    assert layout(first, source) == layout(second, target)
    payload.flags.writeable = False
    import_state(second, target, payload)
    assert (export_state(second, target) == payload).all()
    rest = [SequenceRows(2, (8, 3, 5, 1), stop, 60 - stop)]
    hidden = m.forward(torch.tensor(ids[stop:]), rest, second)
    assert torch.equal(m.head(hidden), _full(m, tuple(ids))[stop:])


def test_states_of_equal_sequences_are_equal_bytes(model):
    """Whatever the slot held before."""
    name, m = model
    ids = golden_ids(name)[:37]
    payloads = []
    for used in (False, True):
        cache = m.new_cache(4, 16, 1)
        for text in ([ids[::-1]] if used else []) + [ids]:
            m.forward(torch.tensor(text), [SequenceRows(0, range(4), 0, 37)], cache)
        payloads.append(export_state(cache, StateSpan(0, range(4), 37)))
    assert (payloads[0] == payloads[1]).all()


def test_only_the_last_position_where_that_is_asked(model):
    name, m = model
    ids = golden_ids(name)[:40]
    assert torch.equal(m.logits(ids, last_only=True), _full(m, tuple(ids))[-1])


def test_the_cache_refuses_blocks_that_cut_groups():
    config = golden_config("a")
    with pytest.raises(Exception, match=r"block_tokens is 3, expected a multiple of the ratios \[1, 2\]"):
        DeepseekCache(config, 4, 3, 1)


def test_the_number_of_threads_changes_no_bit(model):
    name, m = model
    ids = golden_ids(name)[:45]
    expected, before = _full(m, tuple(ids)), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(m.head(run_chunks(m, ids, 11)), expected)
    finally:
        torch.set_num_threads(before)
