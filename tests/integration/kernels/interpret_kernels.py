"""Program of test_triton_interpreted: every kernel in Triton's interpreter against its reference.

Runs in a process of its own, since the interpreter is chosen by TRITON_INTERPRET when a kernel is defined.
Prints one JSON object: case name -> largest difference, relative to the largest reference value.
"""

import json
from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.paged_attention import paged_attention_reference
from kernels.paged_attention_triton import paged_attention_triton
from kernels.q4_1_gemv import q4_1_gemv_reference
from kernels.q4_1_gemv_triton import q4_1_gemv_triton
from kernels.rms_norm import rms_norm_reference
from kernels.rms_norm_triton import rms_norm_triton
from kernels.rope import rope_reference
from kernels.rope_triton import rope_triton

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def main() -> None:
    torch.manual_seed(0)
    print(json.dumps({name: difference(ours, reference) for name, ours, reference in cases()}))


def difference(ours: Tensor, reference: Tensor) -> float:
    assert ours.dtype == reference.dtype
    assert ours.shape == reference.shape
    if reference.numel() == 0:
        return 0.0
    ours, reference = ours.double(), reference.double()
    assert torch.isfinite(ours).all()
    return float((ours - reference).abs().max() / reference.abs().max().clamp(min=1e-30))


def cases() -> Iterator[tuple[str, Tensor, Tensor]]:
    for label, dtype in DTYPES.items():
        for name, ours, reference in [
            *rms_norm_cases(dtype),
            *rope_cases(dtype),
            *paged_attention_cases(dtype),
            *q4_1_cases(dtype),
        ]:
            yield f"{name}/{label}", ours, reference


def rms_norm_cases(dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    for rows, features in [(0, 8), (1, 576), (5, 100), (3, 1)]:
        x, weight = torch.randn(rows, features).to(dtype), torch.randn(features)
        yield (
            f"rms_norm/{rows}x{features}",
            rms_norm_triton(x, weight, 1e-5),
            rms_norm_reference(x, weight, 1e-5),
        )
    wide, weight = torch.randn(4, 96).to(dtype), torch.randn(32)
    x = wide[:, 32:64]  # rows of a fused projection: unit feature stride, larger row stride
    yield "rms_norm/strided", rms_norm_triton(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5)


def rope_cases(dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    for rows, heads, head_dim in [(0, 1, 8), (4, 9, 64), (3, 3, 20), (1, 1, 2)]:
        x = torch.randn(rows, heads, head_dim).to(dtype)
        positions = torch.randint(0, 8192, (rows,))
        yield (
            f"rope/{rows}x{heads}x{head_dim}",
            rope_triton(x, positions, 1e5),
            rope_reference(x, positions, 1e5),
        )


def paged_attention_cases(dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    shapes = {
        "smollm2": ((9, 3, 64, 16), [70, 1, 33, 0]),  # grouped heads, and one padding row
        "multi_head": ((2, 2, 32, 8), [8, 9]),
        "one_kv_head": ((20, 1, 24, 5), [64]),  # group, head and block that are not powers of two
    }
    for name, (shape, lengths) in shapes.items():
        arguments = paged_inputs(shape, lengths, dtype)
        scale = shape[2] ** -0.5
        yield (
            f"paged_attention/{name}",
            paged_attention_triton(*arguments, scale=scale),
            paged_attention_reference(*arguments, scale=scale),
        )


def paged_inputs(
    shape: tuple[int, int, int, int], lengths: list[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    heads, kv_heads, head_dim, block_size = shape
    blocks_needed = [-(-length // block_size) for length in lengths]
    table_width = max(blocks_needed) + 1
    order = torch.randperm(sum(blocks_needed) + 2)
    tables = torch.full((len(lengths), table_width), 2**30, dtype=torch.int32)  # unused entries: far outside
    taken = 0
    for row, count in enumerate(blocks_needed):
        tables[row, :count] = order[taken : taken + count]
        taken += count
    pool = (len(order), block_size, kv_heads, head_dim)
    return (
        torch.randn(len(lengths), heads, head_dim).to(dtype),
        torch.randn(pool).to(dtype),
        torch.randn(pool).to(dtype),
        tables,
        torch.tensor(lengths, dtype=torch.int32),
    )


def q4_1_cases(dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    for rows, outputs, inputs in [(1, 70, 96), (17, 64, 32), (0, 4, 32)]:
        blocks = torch.randint(0, 256, (outputs, inputs // 32, 20), dtype=torch.uint8)
        blocks[..., :4] = torch.randn(outputs, inputs // 32, 2).to(torch.float16).view(torch.uint8)
        x = torch.randn(rows, inputs).to(dtype)
        yield (
            f"q4_1_gemv/{rows}x{outputs}x{inputs}",
            q4_1_gemv_triton(x, blocks),
            q4_1_gemv_reference(x, blocks),
        )


if __name__ == "__main__":
    main()
