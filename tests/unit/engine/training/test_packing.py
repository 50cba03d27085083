"""Windows: whole, of neighbouring tokens, each seen once an epoch by one rank."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.training.packing import Windows, pack

SIZES = {"count": st.integers(0, 500), "length": st.integers(1, 40), "size": st.integers(1, 4)}


@given(**SIZES, num_ranks=st.integers(1, 3), epoch=st.integers(0, 5))
def test_each_window_is_seen_once_by_one_rank(count, length, size, num_ranks, epoch):
    windows = Windows(np.arange(count, dtype=np.uint16), length)
    shares = [list(windows.batches(size, epoch, rank, num_ranks)) for rank in range(num_ranks)]
    assert len({len(share) for share in shares}) == 1
    whole = (count - 2 * length) // length  # windows that fit wherever an epoch's first one begins
    assert len(shares[0]) >= whole // (size * num_ranks)
    rows = [row for share in shares for batch in share for row in batch]
    assert all(len(row) == length + 1 and np.all(np.diff(row.astype(int)) == 1) for row in rows)
    firsts = [int(row[0]) for row in rows]
    assert len(set(firsts)) == len(firsts)
    assert len({first % length for first in firsts}) <= 1


def test_an_epoch_decides_the_order_and_the_places():
    windows = Windows(np.arange(4000, dtype=np.uint16), 32)

    def firsts(epoch):
        return [int(batch[0, 0]) for batch in windows.batches(1, epoch)]

    assert firsts(1) == firsts(1)
    assert firsts(1) != firsts(2)
    assert {f % 32 for f in firsts(1)} != {f % 32 for f in firsts(2)}


def test_files_stand_one_after_the_other():
    assert pack([[0, 5, 6], [0, 7]], 2).tokens.tolist() == [0, 5, 6, 0, 7]
