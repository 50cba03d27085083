"""Decoder bounded replay and window replay: what they change, what they leave; chunks never matter."""

import pytest
import torch
from golden_sets import Recorder, golden_config, golden_ids, golden_model, run_chunks
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.deepseek.replay import decoder_bound, resume_after_hit
from engine.model.deepseek.roles import cut_layer
from engine.model.deepseek.rows import SequenceRows
from engine.model.deepseek.sequence_state import StateSpan, export_state, import_state


@pytest.fixture(scope="module", params=["a", "b"])
def run(request, cpu_library):
    """A model, ids, its window, and the hidden states of the exact run."""
    m, ids = golden_model(request.param), golden_ids(request.param)[:70]
    return m, ids, m.config.sliding_window, run_chunks(m, ids, 70)


def test_a_short_span_changes_nothing(run):
    m, ids, window, exact = run
    bound = decoder_bound(0, window, window)
    assert torch.equal(run_chunks(m, ids[:window], window, decoder_from=bound), exact[:window])


@pytest.mark.parametrize("chunk", [1, 7, 16, 69])
def test_any_chunking_gives_the_same_bits(run, chunk):
    m, ids, window, exact = run
    bound = decoder_bound(0, 70, window)
    whole = run_chunks(m, ids, 70, decoder_from=bound)
    assert torch.equal(run_chunks(m, ids, chunk, decoder_from=bound), whole)
    assert not whole[:bound].any()
    assert not torch.equal(whole[bound:], exact[bound:])


def test_it_changes_decoder_layers_behind_the_cut_alone(run):
    """Entries, encoder streams and the cut layer's streams stay; the next layer's last row does, too."""
    m, ids, window, _ = run
    bound, cut = 70 - window, cut_layer(m.config)
    seen, states = {}, {}
    for name, decoder_from in (("off", 0), ("on", bound)):
        cache, recorder = m.new_cache(5, 16, 1), Recorder()
        rows = [SequenceRows(0, range(5), 0, 70, decoder_from=decoder_from)]
        m.forward(torch.tensor(ids), rows, cache, recorder)
        seen[name] = [recorder.streams[layer][0].x for layer in range(12)]
        states[name] = cache
    for layer in range(cut):
        assert torch.equal(seen["on"][layer], seen["off"][layer])
        assert torch.equal(states["on"].window_LF[layer], states["off"].window_LF[layer])
    assert torch.equal(seen["on"][cut], seen["off"][cut][bound:])
    assert torch.equal(states["on"].window_LF[cut], states["off"].window_LF[cut])
    assert torch.equal(seen["on"][cut + 1][-1], seen["off"][cut + 1][-1])
    assert not torch.equal(seen["on"][cut + 1], seen["off"][cut + 1][bound:])
    for layer, entries in states["on"].sources.items():
        assert torch.equal(entries.main, states["off"].sources[layer].main)
        assert torch.equal(entries.index, states["off"].sources[layer].index)


def _continue(m, ids, spans, chunk, cache=None):
    """Runs spans one after the other in chunks; hidden states of all rows."""
    cache, blocks = cache or m.new_cache(5, 16, 1), range(5)
    parts, start, bound, window = [], 0, 0, m.config.sliding_window
    for length in spans:
        stop = start + length
        bound = decoder_bound(start, stop, window, bound)
        while start < stop:
            count = min(chunk, stop - start)
            rows = SequenceRows(0, blocks, start, count, decoder_from=bound)
            parts.append(m.forward(torch.tensor(ids[start : start + count]), [rows], cache))
            start += count
    return torch.cat(parts), bound


def test_spans_generated_rows_and_a_later_span_in_any_chunks(run):
    """A prompt, five generated rows, a tool's result longer than the window, two generated rows."""
    m, ids, window, _ = run
    spans = [30, *[1] * 5, window + 9, 1, 1]
    runs = [_continue(m, ids, spans, c)[0] for c in (100, 4, 1)]
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])


def test_a_run_resumed_from_exported_state_gives_the_same_bits(run):
    m, ids, _, _ = run
    whole, bound = _continue(m, ids, [50, *[1] * 10], 100)
    first, second = m.new_cache(5, 16, 1), m.new_cache(6, 16, 2)
    _continue(m, ids, [50, *[1] * 5], 9, first)
    payload = export_state(first, StateSpan(0, range(5), 55, decoder_from=bound))
    import_state(second, StateSpan(1, range(5, 0, -1), 55, decoder_from=bound), payload)
    rest = SequenceRows(1, range(5, 0, -1), 55, 5, decoder_from=bound)
    assert torch.equal(m.forward(torch.tensor(ids[55:60]), [rest], second), whole[55:])


def test_trimmed_prompts_decode_rows_and_silent_chunks_share_a_step(run):
    """A chunk of which the decoder sees nothing, one of which it sees some, and a decode row."""
    m, ids, window, _ = run
    bound = decoder_bound(0, 70, window)
    alone = run_chunks(m, ids, 70, decoder_from=bound)
    cache = m.new_cache(15, 16, 3)
    blocks = {slot: range(5 * slot, 5 * slot + 5) for slot in range(3)}

    def rows(slot, start, count):
        return SequenceRows(slot, blocks[slot], start, count, decoder_from=bound)

    for slot, count in ((1, bound - 3), (2, 69)):
        m.forward(torch.tensor(ids[:count]), [rows(slot, 0, count)], cache)
    step = [rows(0, 0, 20), rows(1, bound - 3, 9), rows(2, 69, 1)]
    tokens = [*ids[:20], *ids[bound - 3 : bound + 6], ids[69]]
    hidden = m.forward(torch.tensor(tokens), step, cache)
    expected = torch.cat((alone[:20], alone[bound - 3 : bound + 6], alone[69:]))
    assert torch.equal(hidden, expected)


@pytest.mark.parametrize("chunk", [3, 100])
def test_a_prefix_hit_resumes_without_touching_known_entries(run, chunk):
    """As if windows began at the hit's replay; in any chunks; entries of the prefix stay as they were."""
    m, ids, window, exact = run
    cache = m.new_cache(8, 16, 2)
    m.forward(torch.tensor(ids[:48]), [SequenceRows(0, range(3), 0, 48)], cache)
    known = [t.clone() for s in cache.sources.values() for t in (s.main, s.index)]
    hit = resume_after_hit(32, window)
    assert (hit.start, hit.write_from) == (32 - window, 32)
    blocks, parts, start = (0, 1, 4, 5, 6), [], hit.start
    cache.seed_lookback(1, ids[: hit.start])
    while start < 70:
        count = min(chunk, 70 - start)
        rows = SequenceRows(1, blocks, start, count, window_from=hit.window_from, write_from=hit.write_from)
        parts.append(m.forward(torch.tensor(ids[start : start + count]), [rows], cache))
        start += count
    now = [t for s in cache.sources.values() for t in (s.main, s.index)]
    for before, after in zip(known, now, strict=True):
        stay = before.shape[0] * 3 // 8
        assert torch.equal(after[:stay], before[:stay])
    once = m.new_cache(8, 16, 2)
    m.forward(torch.tensor(ids[:48]), [SequenceRows(0, range(3), 0, 48)], once)
    once.seed_lookback(1, ids[: hit.start])
    rows = SequenceRows(
        1, blocks, hit.start, 70 - hit.start, window_from=hit.window_from, write_from=hit.write_from
    )
    assert torch.equal(torch.cat(parts), m.forward(torch.tensor(ids[hit.start :]), [rows], once))
    assert not torch.equal(torch.cat(parts), exact[hit.start :])


def test_a_hit_within_the_window_counts_as_none():
    assert resume_after_hit(8, 8) == resume_after_hit(0, 8)
    assert resume_after_hit(10, 8).start == 2


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8), window=st.integers(1, 16))
@settings(deadline=None)
def test_the_bound_never_goes_back_and_keeps_the_last_rows(lengths, window):
    start = bound = 0
    for length in lengths:
        before, bound = bound, decoder_bound(start, start + length, window, bound)
        assert before <= bound <= start + max(length - window, 0)
        assert start + length - bound >= min(length, window)
        start += length


def test_the_lookback_crosses_the_boundary_of_a_hit():
    """Without the ids before it, an n-gram that straddles the boundary would hash otherwise."""
    m, ids = golden_model("a"), golden_ids("a")[:40]
    window = golden_config("a").sliding_window
    hit, found = resume_after_hit(16, window), {}
    for seeded in (True, False):
        cache = m.new_cache(3, 16, 1)
        m.forward(torch.tensor(ids), [SequenceRows(0, range(3), 0, 40)], cache)
        cache.seed_lookback(0, ids[: hit.start] if seeded else [9] * hit.start)
        rows = SequenceRows(0, range(3), hit.start, 20, window_from=hit.start, write_from=hit.write_from)
        found[seeded] = m.forward(torch.tensor(ids[hit.start : hit.start + 20]), [rows], cache)
    assert not torch.equal(found[True][0], found[False][0])
