"""Index tensors of a step against positions counted by hand, over random sequences of chunks."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.deepseek.rows import Rows, SequenceRows

SLOTS, BLOCK, SPARE = 3, 4, 3
chunks = st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(1, 9)), min_size=1, max_size=12)


def _steps(plan):
    """Chunks of several sequences: one step until a slot comes again, each sequence going on where it was."""
    starts, step = [0] * SLOTS, []
    for slot, count in plan:
        if any(s.slot == slot for s in step):
            yield step
            step = []
        blocks = range(100 + 50 * slot, 150 + 50 * slot)
        step.append(SequenceRows(slot, blocks, starts[slot], count))
        starts[slot] += count
    yield step


def _label(slot, position):
    return 1000 * (slot + 1) + position


@given(plan=chunks, width=st.integers(1, 6), bound=st.integers(0, 7))
@settings(deadline=None)
def test_windows_find_each_position_in_ring_or_step(plan, width, bound):
    ring_rows = width + SPARE
    ring = torch.full((SLOTS * ring_rows,), -1)
    for step in _steps(plan):
        bounded = [replace(s, window_from=bound) for s in step]
        rows = Rows(bounded, BLOCK)
        new = torch.tensor([_label(s.slot, p) for s in step for p in range(s.start, s.stop)])
        windows = rows.windows(width, ring_rows)
        found = windows.pool(ring, new, torch.zeros(1, dtype=torch.int64))[windows.index].tolist()
        expected = [
            [_label(s.slot, q) if q >= bound else 0 for q in range(p - width + 1, p + 1)]
            for s in step for p in range(s.start, s.stop)
        ]  # fmt: skip
        assert found == expected
        ring[windows.stored_ring] = new[windows.stored_rows]
        if all(s.count + width - 1 <= ring_rows for s in step):
            short = rows.windows_in_ring(width, ring_rows)
            found = torch.where(short.index < 0, 0, ring[short.index.clamp(min=0)]).tolist()
            assert found == expected
            assert ring[short.stored_ring].tolist() == new.tolist()
        for s in step:
            for p in range(max(0, s.stop - ring_rows), s.stop):
                assert ring[s.slot * ring_rows + p % ring_rows] == _label(s.slot, p)


@given(plan=chunks, ratio=st.sampled_from([1, 2, 4]), write_from=st.integers(0, 3))
@settings(deadline=None)
def test_groups_are_completed_once_and_in_their_blocks(plan, ratio, write_from):
    ring_rows = ratio - 1 + SPARE
    ring = torch.full((SLOTS * ring_rows, 1), -1)
    seen = []
    for step in _steps(plan):
        rows = Rows([replace(s, write_from=4 * write_from) for s in step], BLOCK)
        new = torch.tensor([_label(s.slot, p) for s in step for p in range(s.start, s.stop)])
        groups = rows.groups(ratio, ring_rows)
        ends = [(s, p) for s in step for p in range(s.start, s.stop) if (p + 1) % ratio == 0]
        firsts = [p - ratio + 1 for _, p in ends]
        assert groups.first_positions.tolist() == firsts
        if groups.members is not None:
            members = groups.members.exchange(ring, new[:, None], torch.zeros(1, 1, dtype=torch.int64))
            expected = [[_label(s.slot, q) for q in range(p - ratio + 1, p + 1)] for s, p in ends]
            assert members[..., 0].tolist() == expected
        kept = [i for i, first in enumerate(firsts) if first >= 4 * write_from]
        assert groups.written.tolist() == kept
        size = BLOCK // ratio
        entries = [ends[i][0].blocks[firsts[i] // BLOCK] * size + firsts[i] // ratio % size for i in kept]
        assert groups.entries.tolist() == entries
        seen += entries
    assert len(seen) == len(set(seen))


@given(plan=chunks, decoder_from=st.integers(0, 12))
@settings(deadline=None)
def test_trimmed_rows_are_those_from_the_bound_on(plan, decoder_from):
    for step in _steps(plan):
        for s in step:
            trimmed = replace(s, decoder_from=decoder_from).trimmed()
            kept = [p for p in range(s.start, s.stop) if p >= decoder_from]
            assert (list(range(trimmed.start, trimmed.stop)) if trimmed else []) == kept
            assert trimmed is None or trimmed.window_from == decoder_from


def test_visible_entries_follow_the_block_table():
    rows = Rows([SequenceRows(0, (7, 2), 3, 4), SequenceRows(1, (5,), 0, 1)], 4)
    assert rows.visible_entries(0, 2).tolist() == [14, 15, 4]
    assert rows.visible_entries(0, 1).tolist() == [28, 29, 30, 31, 8, 9, 10]
    assert rows.visible_entries(1, 2).tolist() == []
    assert rows.row_slice(1) == slice(4, 5)
