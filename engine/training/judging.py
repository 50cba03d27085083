"""nano's loss on held-out text: nats a window, so that two ways of running it can be compared in pairs.

A file is cut into windows of `length` tokens; each is judged from its second token on, and bits per byte
count the bytes of what is judged. Standard errors are over windows, of ratios of sums.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import TypeVar

import numpy as np
import torch
from tokenizers import Tokenizer

from engine.training.batches import BatchMaker
from engine.training.losses import cross_entropy
from engine.training.network import Mode, Network
from engine.training.packing import Ids
from engine.training.parameters import Parameters

T = TypeVar("T")
AT_ONCE = 8  # windows of one pass


@dataclass(frozen=True, slots=True)
class Measured:
    """A value and its standard error, which is infinite where there was one window."""

    value: float
    error: float

    @property
    def errors_from_zero(self) -> float:
        """How many standard errors the value is away from nothing."""
        if self.value == 0.0:
            return 0.0
        return abs(self.value) / self.error if self.error > 0.0 else math.inf


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens of one held-out file that stand together, and the bytes of each."""

    ids: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of all but the first token, which nothing predicts."""
        return sum(self.sizes[1:])


@dataclass(frozen=True, slots=True)
class Judgement:
    """Of each window, nats in all and bytes."""

    nats: tuple[float, ...]
    num_bytes: tuple[int, ...]

    @property
    def measured(self) -> Measured:
        """Bits per byte."""
        return ratio([nats / math.log(2) for nats in self.nats], self.num_bytes)

    @property
    def bits_per_byte(self) -> float:
        return self.measured.value


def ratio(parts: Sequence[float], sizes: Sequence[float]) -> Measured:
    """sum of parts / sum of sizes, of windows that may differ in size."""
    value = sum(parts) / sum(sizes)
    if len(parts) < 2:
        return Measured(value, math.inf)
    residuals = [part - value * size for part, size in zip(parts, sizes, strict=True)]
    return Measured(value, stdev(residuals) / mean(sizes) / math.sqrt(len(parts)))


def windows_of(
    tokenizer: Tokenizer, files: Sequence[Sequence[int]], length: int, least: int = 64
) -> list[Window]:
    """All windows of at least `least` tokens, file by file."""
    return [
        Window(tuple(ids), tuple(len(piece) for piece in _pieces(tokenizer, ids)))
        for file in files
        for start in range(0, len(file), length)
        if len(ids := file[start : start + length]) >= least
    ]


def evenly(items: Sequence[T], count: int | None) -> list[T]:
    """`count` of them, spread over all; None takes all."""
    if count is None or count >= len(items):
        return list(items)
    return [items[number * len(items) // count] for number in range(count)]


def judge(
    network: Network, p: Parameters, batches: BatchMaker, windows: Sequence[Window], mode: Mode
) -> Judgement:
    """8 windows at a time; shorter ones are padded behind. Takes long."""
    nats: list[float] = []
    with torch.no_grad():
        for group in in_groups(windows, AT_ONCE):
            nats += _nats(network, p, batches, group, mode)
    return Judgement(tuple(nats), tuple(window.num_bytes for window in windows))


def padded(windows: Sequence[Window], step: int) -> Ids:
    """[B, T] with zeros behind the shorter ones; T is a multiple of `step`."""
    longest = max(len(window.ids) for window in windows)
    ids = np.zeros((len(windows), -(-longest // step) * step), np.uint16)
    for row, window in enumerate(windows):
        ids[row, : len(window.ids)] = window.ids
    return ids


def in_groups(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Runs of up to `size`."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def alike(windows: Iterable[Window]) -> list[Window]:
    """The longest first: little is padded where neighbours share a pass, and processes end together."""
    return sorted(windows, key=lambda window: len(window.ids), reverse=True)


def _nats(
    network: Network, p: Parameters, batches: BatchMaker, group: Sequence[Window], mode: Mode
) -> list[float]:
    hidden, _ = network.forward(p, batches(padded(group, network.config.sliding_window)), mode)
    return [
        float(cross_entropy(hidden[row, : len(w.ids) - 1], p["head.weight"], torch.tensor(w.ids[1:])))
        * (len(w.ids) - 1)
        for row, w in enumerate(group)
    ]


def _pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> Iterator[str]:
    """Each token's bytes, a character a byte, as byte-level BPE spells them; control tokens have none."""
    for token in ids:
        piece = tokenizer.id_to_token(token)
        assert piece is not None
        yield "" if piece.startswith("<｜") else piece
