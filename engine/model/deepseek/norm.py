"""RMSNorm (section 1): y = w * x / sqrt(mean(x^2) + eps), in float32. Shapes: T rows, K channels."""

from dataclasses import dataclass

from torch import Tensor

from engine import numerics
from engine.model.tensor_source import TensorSource
from kernels.fused import LANES
from kernels.operations import Operations


@dataclass(frozen=True, slots=True)
class RmsNorm:
    weight: Tensor
    eps: float

    @classmethod
    def take(cls, source: TensorSource, name: str, channels: int, eps: float) -> "RmsNorm":
        return cls(source.take(f"{name}.weight", (channels,)), eps)

    def __call__(self, operations: Operations, x_TK: Tensor) -> Tensor:
        if x_TK.shape[1] % LANES == 0:
            return operations.rms_norm(x_TK.contiguous(), self.weight, self.eps)
        return x_TK * (numerics.mean_square(x_TK) + self.eps).rsqrt() * self.weight
