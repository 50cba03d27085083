"""A block of the vision tower (section 9): attention of all patches to all, then a gated MLP.

Shapes: N patches of one image, C channels, H heads, D channels of a head, Q queries at a time.
An image goes through alone, so its bits depend on its own pixels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine import numerics
from engine.model.deepseek.image_size import ImageGrid
from engine.model.deepseek.norm import RmsNorm
from engine.model.deepseek.rope import plain_frequencies
from engine.model.deepseek.vision_config import VisionConfig
from engine.model.tensor_source import TensorSource
from engine.numerics import Dense
from kernels.operations import Operations

NORM_EPS = 1e-6
_SCORES = 1 << 24  # float32 attention logits at a time: 64 MiB


@dataclass(frozen=True, slots=True)
class Affine:
    """x W^T + b."""

    weight: Dense
    bias: Tensor

    @classmethod
    def take(cls, source: TensorSource, name: str, rows: int, columns: int) -> "Affine":
        weight = Dense.of(source.take(f"{name}.weight", (rows, columns)))
        return cls(weight, source.take(f"{name}.bias", (rows,)))

    def __call__(self, operations: Operations, x_NC: Tensor) -> Tensor:
        return numerics.linear(operations, x_NC, (self.weight,))[0] + self.bias


@dataclass(frozen=True, slots=True)
class PlaneAngles:
    """cos and sin [N, D/2] of each patch: half of a head's pairs turn by its row, half by its column."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, grid: ImageGrid, channels: int, base: float) -> "PlaneAngles":
        """D/4 frequencies each, base^(-2i / (D/2)); float64 angles, rounded once."""
        frequencies = plain_frequencies(base, channels // 2)
        rows = torch.arange(grid.patch_rows, dtype=torch.float64)[:, None, None] * frequencies
        columns = torch.arange(grid.patch_columns, dtype=torch.float64)[None, :, None] * frequencies
        shape = (grid.patch_rows, grid.patch_columns, len(frequencies))
        angles = torch.cat((rows.expand(shape), columns.expand(shape)), -1).flatten(0, 1)
        return cls(angles.cos().float(), angles.sin().float())

    def rotate(self, x_HND: Tensor) -> Tensor:
        """Pairs are (i, i + D/2)."""
        low, high = x_HND.chunk(2, -1)
        return torch.cat((low * self.cos - high * self.sin, high * self.cos + low * self.sin), -1)


class VisionBlock:
    """x += attention(norm1(x)); x += MLP(norm2(x))."""

    def __init__(self, vision: VisionConfig, source: TensorSource, prefix: str) -> None:
        c, inner = vision.hidden_size, vision.intermediate_size
        self._heads = vision.num_attention_heads
        self._qkv = Affine.take(source, f"{prefix}.attn.wqkv", 3 * c, c)
        self._output = Affine.take(source, f"{prefix}.attn.wo", c, c)
        self._gate_up = Dense.of(source.take(f"{prefix}.mlp.w1.weight", (2 * inner, c)))
        self._down = Dense.of(source.take(f"{prefix}.mlp.w2.weight", (c, inner)))
        self._norm1 = RmsNorm.take(source, f"{prefix}.norm1", c, NORM_EPS)
        self._norm2 = RmsNorm.take(source, f"{prefix}.norm2", c, NORM_EPS)

    def __call__(self, operations: Operations, x_NC: Tensor, angles: PlaneAngles) -> Tensor:
        qkv = self._qkv(operations, self._norm1(operations, x_NC))
        q, k, v = qkv.view(len(x_NC), 3, self._heads, -1).permute(1, 2, 0, 3)
        mixed_HND = attend_all(angles.rotate(q), angles.rotate(k), v.contiguous())
        x_NC = x_NC + self._output(operations, mixed_HND.transpose(0, 1).flatten(1))
        inner = numerics.linear(operations, self._norm2(operations, x_NC), (self._gate_up,))[0]
        gate, up = inner.chunk(2, 1)
        return x_NC + numerics.linear(operations, numerics.silu_mul(gate, up), (self._down,))[0]


def attend_all(q_HND: Tensor, k_HND: Tensor, v_HND: Tensor) -> Tensor:
    """[H, N, D]: softmax(q k^T / sqrt(D)) v, over chunks of queries whose size the image's own gives."""
    heads, count, channels = q_HND.shape
    chunk, keys_HDN = max(1, _SCORES // (heads * count)), k_HND.transpose(1, 2)
    parts: list[Tensor] = []
    for start in range(0, count, chunk):
        logits_HQN = numerics.batched_product(q_HND[:, start : start + chunk], keys_HDN)
        weights_HQN = numerics.softmax(logits_HQN.mul_(channels**-0.5))
        parts.append(numerics.batched_product(weights_HQN, v_HND))
    return torch.cat(parts, 1)
