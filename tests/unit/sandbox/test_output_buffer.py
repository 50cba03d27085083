"""Head and tail of a stream in bounded memory."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.output import OutputBuffer

MARKER = b"\n[... %d bytes dropped ...]\n"


@given(st.lists(st.binary(max_size=50)), st.integers(min_value=0, max_value=64))
def test_keeps_everything_or_head_marker_and_tail(chunks: list[bytes], limit: int):
    whole = b"".join(chunks)
    buffer = OutputBuffer(limit)
    for chunk in chunks:
        buffer.add(chunk)

    assert buffer.total_bytes == len(whole)
    assert buffer.truncated == (len(whole) > limit)
    if len(whole) <= limit:
        assert buffer.value() == whole
    else:
        head, tail = (limit + 1) // 2, limit // 2
        expected = whole[:head] + MARKER % (len(whole) - limit) + whole[len(whole) - tail :]
        assert buffer.value() == expected


def test_memory_stays_within_three_limits_whatever_is_added():
    buffer = OutputBuffer(1000)
    for _ in range(10_000):
        buffer.add(b"x" * 777)
        assert len(buffer._head._block) + len(buffer._tail) <= 3 * 1000


@pytest.mark.parametrize("num_bytes", [65_535, 65_537, 1 << 20, (1 << 20) + 1, 3_000_000])
def test_large_output_is_kept_whole_and_blocks_are_nobodys_afterwards(num_bytes: int):
    values: list[tuple[bytes, bytes]] = []
    for _ in range(3):
        whole, buffer = random.randbytes(num_bytes), OutputBuffer(8 << 20)
        for start in range(0, num_bytes, 50_000):
            buffer.add(memoryview(whole)[start : start + 50_000])
        values.append((whole, buffer.value()))
    assert all(whole == kept for whole, kept in values)


def test_value_can_be_read_more_than_once():
    buffer = OutputBuffer(4)
    buffer.add(b"abcdefgh")
    assert buffer.value() == buffer.value()
