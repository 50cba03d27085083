"""nano's loss on held-out text: nats a window, so that two ways of running it can be compared in pairs.

A file is cut into windows of `length` tokens; each is judged from its second token on, and bits per byte
count the bytes of what is judged.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

import numpy as np
import torch
from tokenizers import Tokenizer

from engine.training.batches import BatchMaker
from engine.training.losses import cross_entropy
from engine.training.network import Mode, Network
from engine.training.parameters import Parameters


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens of one held-out file that stand together, and the bytes of all but the first."""

    ids: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Judgement:
    """Of each window, nats in all and bytes."""

    nats: tuple[float, ...]
    num_bytes: tuple[int, ...]

    @property
    def bits_per_byte(self) -> float:
        return sum(self.nats) / sum(self.num_bytes) / math.log(2)

    @property
    def standard_error(self) -> float:
        """Of the bits per byte, over windows."""
        if len(self.nats) < 2:
            return math.inf
        overall = self.bits_per_byte * math.log(2)
        residuals = [nats - overall * size for nats, size in zip(self.nats, self.num_bytes, strict=True)]
        return stdev(residuals) / mean(self.num_bytes) / math.sqrt(len(self.nats)) / math.log(2)


def windows_of(
    tokenizer: Tokenizer, files: Sequence[Sequence[int]], length: int, least: int = 64
) -> list[Window]:
    """All windows of at least `least` tokens, file by file."""
    return [
        Window(tuple(ids), sum(len(piece) for piece in _pieces(tokenizer, ids[1:])))
        for file in files
        for start in range(0, len(file), length)
        if len(ids := file[start : start + length]) >= least
    ]


def judge(
    network: Network, p: Parameters, batches: BatchMaker, windows: Sequence[Window], mode: Mode
) -> Judgement:
    """Windows of equal length go together, 8 at a time; shorter ones are padded behind. Takes long."""
    nats: list[float] = []
    with torch.no_grad():
        for group in _in_groups(windows, 8):
            nats += _nats(network, p, batches, group, mode)
    return Judgement(tuple(nats), tuple(window.num_bytes for window in windows))


def _nats(
    network: Network, p: Parameters, batches: BatchMaker, group: Sequence[Window], mode: Mode
) -> list[float]:
    step = network.config.sliding_window
    longest = max(len(window.ids) for window in group)
    width = -(-longest // step) * step
    padded = np.zeros((len(group), width), np.uint16)
    for row, window in enumerate(group):
        padded[row, : len(window.ids)] = window.ids
    hidden, _ = network.forward(p, batches(padded), mode)
    return [
        float(cross_entropy(hidden[row, : len(w.ids) - 1], p["head.weight"], torch.tensor(w.ids[1:])))
        * (len(w.ids) - 1)
        for row, w in enumerate(group)
    ]


def _in_groups(windows: Sequence[Window], size: int) -> Iterator[Sequence[Window]]:
    for start in range(0, len(windows), size):
        yield windows[start : start + size]


def _pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> Iterator[str]:
    """Each token's bytes, a character a byte, as byte-level BPE spells them; control tokens have none."""
    for token in ids:
        piece = tokenizer.id_to_token(token)
        assert piece is not None
        yield "" if piece.startswith("<｜") else piece
