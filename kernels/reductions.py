"""What PyTorch cuts among its threads, and rounds otherwise with each number of them: here it is not cut."""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def one_thread() -> Generator[None]:
    """PyTorch runs on one thread inside."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def mean_square(x: Tensor) -> Tensor:
    """Mean of squares over the last dimension, which it keeps: one reduction a row."""
    squares = x.square()
    if not is_cut(x):
        return squares.mean(-1, keepdim=True)
    with one_thread():
        return squares.mean(-1, keepdim=True)


def is_cut(x: Tensor) -> bool:
    """Whether torch may cut a reduction among its threads: that of a single long row."""
    return x.numel() == x.shape[-1]
