"""Rotary embeddings: plain for window layers, YaRN for layers that read compressed entries (section 2.2).

Shapes: T rows, H heads, R rotary channels (the last of a head), P positions. Pairs are adjacent channels:
(a, b) -> (a cos - b sin, b cos + a sin).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.deepseek.config import YarnScaling
from engine.model.deepseek.shape import TextShape

_STRETCH = 1024  # positions whose angles are taken at a time, so that a position's bits never depend on more


@dataclass(frozen=True, slots=True)
class Angles:
    """cos and sin of some rows' positions, each channel its own; sin is negative on even channels."""

    cos: Tensor
    sin: Tensor

    def __getitem__(self, rows: Tensor) -> "Angles":
        return Angles(self.cos[rows], self.sin[rows])

    def inverse(self) -> "Angles":
        """The rotation back: sin changes its sign (section 2.1, step 7)."""
        return Angles(self.cos, -self.sin)


class RotaryTable:
    """Angles by position, grown as positions are asked for. Not thread-safe."""

    def __init__(self, frequencies: Tensor) -> None:
        self._frequencies = frequencies  # float64 [R/2]
        self._cos_PR = self._sin_PR = torch.empty(0, 2 * len(frequencies))

    def angles(self, positions_T: Tensor) -> Angles:
        """Of int64 positions. float64 angles, rounded once."""
        if positions_T.shape[0]:
            self._grow(int(positions_T.max()) + 1)
        return Angles(self._cos_PR[positions_T], self._sin_PR[positions_T])

    def _grow(self, num_positions: int) -> None:
        known = self._cos_PR.shape[0]
        if num_positions <= known:
            return
        starts = range(known, max(num_positions, 2 * known), _STRETCH)
        parts = [self._stretch(start) for start in starts]
        cos_PR = torch.cat([self._cos_PR, *(cos for cos, _ in parts)])
        sin_PR = torch.cat([self._sin_PR, *(sin for _, sin in parts)])
        self._cos_PR, self._sin_PR = cos_PR, sin_PR  # both or, where there is no memory, neither

    def _stretch(self, start: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(start, start + _STRETCH, dtype=torch.float64)
        angles = positions[:, None] * self._frequencies
        cos, sin = angles.cos().float(), angles.sin().float()
        return torch.stack((cos, cos), -1).flatten(1), torch.stack((-sin, sin), -1).flatten(1)


def rotate_(x: Tensor, angles: Angles) -> None:
    """Rotates the last R channels of x [T, D] or [T, H, D] in place, each row by its own angles."""
    cos, sin = angles.cos, angles.sin
    if x.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    tail = x[..., x.shape[-1] - cos.shape[-1] :]
    swapped = torch.flip(tail.reshape(*tail.shape[:-1], -1, 2), (-1,)).flatten(-2)
    tail.copy_(tail * cos + swapped * sin)


def plain_frequencies(base: float, channels: int) -> Tensor:
    """float64 [R/2]: f_i = base^(-2i/R)."""
    return torch.pow(base, -torch.arange(0, channels, 2, dtype=torch.float64) / channels)


def yarn_bounds(base: float, channels: int, yarn: YarnScaling) -> tuple[int, int]:
    """(low, high): pairs below keep their frequency, pairs above are slowed by the factor; 15, 25 released.

    low = floor(c(beta_fast)), high = ceil(c(beta_slow)), c(beta) = R ln(original / 2 pi beta) / (2 ln base).
    """

    def turning_pair(beta: float) -> float:
        original = yarn.original_max_position_embeddings
        return channels * math.log(original / (2 * math.pi * beta)) / (2 * math.log(base))

    low, high = math.floor(turning_pair(yarn.beta_fast)), math.ceil(turning_pair(yarn.beta_slow))
    return max(low, 0), min(high, channels - 1)


def yarn_frequencies(base: float, channels: int, yarn: YarnScaling) -> Tensor:
    """f'_i = f_i (1 - ramp_i) + f_i / factor * ramp_i, ramp_i = clamp((i - low) / (high - low), 0, 1)."""
    plain = plain_frequencies(base, channels)
    low, high = yarn_bounds(base, channels, yarn)
    pairs = torch.arange(channels // 2, dtype=torch.float64)
    ramp = ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)
    return plain * (1 - ramp) + plain / yarn.factor * ramp


@dataclass(frozen=True, slots=True)
class RotaryTables:
    """A model's two: `window` for ratio 0, `compressed` for the others, their window entries included."""

    window: RotaryTable
    compressed: RotaryTable

    @classmethod
    def of(cls, config: TextShape) -> "RotaryTables":
        channels, base, yarn = config.qk_rope_head_dim, config.compress_rope_theta, config.rope_scaling
        stretched = (
            plain_frequencies(base, channels) if yarn is None else yarn_frequencies(base, channels, yarn)
        )
        return cls(RotaryTable(plain_frequencies(config.rope_theta, channels)), RotaryTable(stretched))

    def table(self, ratio: int) -> RotaryTable:
        return self.compressed if ratio else self.window
