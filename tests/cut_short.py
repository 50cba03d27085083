"""Writes that the kernel cuts short, as at the end of a full disk."""

import resource
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def files_end_at(num_bytes: int) -> Generator[None]:
    """No file of this process grows beyond that meanwhile: what would is written as far as it fits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
