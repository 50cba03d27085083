"""What makes a training quick on a processor: small operations in one compiled loop, products of bfloat16.

A step of nano is thousands of elementwise operations beside its products. Fused by a C++ compiler, and with
product inputs rounded to bfloat16 where the processor multiplies those (sums, weights and what lies between
stay float32), it takes a third of the time. Off unless a training asks: what is computed is the same to
rounding, and tests and judgements want one set of bits.
"""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
_SHAPES = 128  # of one function: spans, lengths, batches, with and without gradients


class _Switch:
    on = False


def use_fast() -> bool:
    """From here on, in this process. False, and nothing changed, without a compiler."""
    _Switch.on = shutil.which("g++") is not None
    if _Switch.on and "avx512_bf16" in Path("/proc/cpuinfo").read_text():
        torch.set_float32_matmul_precision("medium")
    return _Switch.on


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """Compiled at its first call when `use_fast` was called, else as it is written."""

    @functools.cache
    def compiled() -> Callable[P, R]:
        torch._dynamo.config.recompile_limit = _SHAPES  # pyright: ignore[reportPrivateUsage] - no other door
        return torch.compile(function, dynamic=False)  # pyright: ignore[reportUnknownMemberType]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return (compiled() if _Switch.on else function)(*args, **kwargs)

    return call
