"""Rotary position embedding (Su et al., 2021) in the layout of Llama weights from GGUF.

The features of a head are adjacent pairs (0, 1), (2, 3), …; pair i turns by `position * theta^(-2i/D)`.
GGUF permutes the rows of the query and key projections for this layout. Hugging Face checkpoints pair
feature i with i + D/2 instead: a loader of those must permute, or the output is silently wrong.

Shapes: T rows (tokens), H heads, D features a head, P = D/2 pairs.
"""

import torch
from torch import Tensor

from kernels.triton_door import require_triton


def rope(x_THD: Tensor, positions_T: Tensor, theta: float) -> Tensor:
    """Rotate each pair by the angle of its row's position, in float32, rounded once to the type of `x`.

    Angles are taken in float64: of float32's, an error at position 32,000 is 1e-3 rad.
    `positions_T` is an integer tensor on the device of `x`. CPU tensors take the PyTorch reference, CUDA
    tensors the Triton kernel. Returns a new tensor [T, H, D]. Raises `MissingCapability` for a CUDA tensor
    without Triton.
    """
    num_rows, _, head_dim = x_THD.shape
    assert head_dim % 2 == 0, head_dim
    assert positions_T.shape == (num_rows,), (positions_T.shape, x_THD.shape)
    assert not positions_T.is_floating_point(), positions_T.dtype
    if not x_THD.is_cuda:
        return rope_reference(x_THD, positions_T, theta)
    require_triton("rope")
    from kernels.rope_triton import rope_triton

    return rope_triton(x_THD, positions_T, theta)


def rope_reference(x_THD: Tensor, positions_T: Tensor, theta: float) -> Tensor:
    """The same function in plain PyTorch, on any device."""
    frequencies_P = rope_frequencies(x_THD.shape[2], theta, x_THD.device)
    angles_T1P = (positions_T.to(torch.float64)[:, None] * frequencies_P)[:, None, :]
    cos_T1P, sin_T1P = angles_T1P.cos().float(), angles_T1P.sin().float()
    x = x_THD.to(torch.float32)
    even_THP, odd_THP = x[..., 0::2], x[..., 1::2]
    turned_THP2 = torch.stack(
        (even_THP * cos_T1P - odd_THP * sin_T1P, odd_THP * cos_T1P + even_THP * sin_T1P), dim=-1
    )
    return torch.flatten(turned_THP2, start_dim=2).to(x_THD.dtype)


def rope_frequencies(head_dim: int, theta: float, device: torch.device) -> Tensor:
    """Radians a position for each pair, float32 [D/2].

    Powers are taken in float64: one last-place error of a float32 power becomes 1e-3 rad at position 8,000,
    and the reference and the kernel would drift apart with the length of the text.
    """
    exponents_P = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
    return (theta**-exponents_P).to(torch.float32)
