"""Files in memory are whole, or none."""

import os
from pathlib import Path

import pytest
from cut_short import files_end_at

from sandbox.memory_files import memory_file


@pytest.mark.parametrize("content", [b"", b"abc", memoryview(b"x" * 100_000)])
def test_one_is_read_from_its_start(content: bytes | memoryview):
    with os.fdopen(memory_file(content), "rb") as file:
        assert file.read() == bytes(content)


def test_one_that_a_limit_cuts_short_is_none():
    fds = Path("/proc/self/fd")
    before = len(list(fds.iterdir()))
    with files_end_at(5000), pytest.raises(OSError, match="too large"):
        memory_file(b"x" * 10_000)
    assert len(list(fds.iterdir())) == before
