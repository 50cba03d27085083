"""Root-mean-square normalisation (Zhang and Sennrich, 2019), as Llama uses it: no mean, no bias.

Shapes: T rows (tokens), D features.
"""

import torch
from torch import Tensor

from kernels.reductions import mean_square
from kernels.triton_door import require_triton


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` for each row, in float32, rounded once to the type of `x`.

    CPU tensors take the PyTorch reference, CUDA tensors the Triton kernel. Returns a new tensor [T, D].
    Raises `MissingCapability` for a CUDA tensor without Triton.
    """
    assert x_TD.shape == (x_TD.shape[0], *weight_D.shape), (x_TD.shape, weight_D.shape)
    if not x_TD.is_cuda:
        return rms_norm_reference(x_TD, weight_D, eps)
    require_triton("rms_norm")
    from kernels.rms_norm_triton import rms_norm_triton

    return rms_norm_triton(x_TD, weight_D, eps)


def rms_norm_reference(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """The same function in plain PyTorch, on any device."""
    x = x_TD.to(torch.float32)
    inverse_rms_T1 = torch.rsqrt(mean_square(x) + eps)
    return (x * inverse_rms_T1 * weight_D.to(torch.float32)).to(x_TD.dtype)
