"""The form of the kernels that processors with AVX-512 run, built here with vectors of sixteen lanes."""

import pytest
import torch

from kernels.cpu.build import compile_to
from kernels.cpu.library import open_library
from kernels.cpu.operations import CpuOperations
from kernels.operations import Rope, Rows, Weight
from kernels.torch_operations import TorchOperations


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> CpuOperations:
    path = tmp_path_factory.mktemp("wide") / "wide.so"
    compile_to(path, "-DLANES=16", "-mno-avx512f")
    return CpuOperations(2, library=open_library(path))


@pytest.mark.parametrize(("form", "bytes_a_block"), [("q4_1", 20), ("q8_0", 34), ("f32", 0)])
def test_products(wide: CpuOperations, form: str, bytes_a_block: int) -> None:
    generator = torch.Generator().manual_seed(1)
    rows, columns = 51, 576
    if form == "f32":
        data = torch.randn(rows, columns, generator=generator)
    else:
        data = torch.randint(
            0, 256, (rows, columns // 32, bytes_a_block), generator=generator, dtype=torch.uint8
        )
        data[..., 1] = 0x2C  # a scale of about 0.06 instead of any 16 bits, which could be infinite
        data[..., 3] = 0x2C if form == "q4_1" else data[..., 3]
        data = data.flatten(1)
    weight = Weight(data, rows, columns, form)  # pyright: ignore[reportArgumentType]
    x = torch.randn(29, columns, generator=generator)
    found, expected = wide.linear(x, (weight,))[0], TorchOperations().linear(x, (weight,))[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    for row in range(29):
        assert torch.equal(wide.linear(x[row : row + 1], (weight,))[0][0], found[row])


def test_attention_rope_and_norm(wide: CpuOperations) -> None:
    generator = torch.Generator().manual_seed(2)
    positions = torch.tensor([0, 5, 16, 33, 49])
    rows = Rows(positions, torch.zeros(5, dtype=torch.int64), torch.tensor([[3, 0, 2, 1]], dtype=torch.int32))
    cache = torch.randn(4, 2, 16, 3, 64, generator=generator)
    q = torch.randn(5, 9, 64, generator=generator)
    torch.testing.assert_close(
        wide.paged_attention(q, cache, rows, 0.125), TorchOperations().paged_attention(q, cache, rows, 0.125),
        rtol=1e-4, atol=1e-4,
    )  # fmt: skip
    x, weight, rope = q.flatten(1).contiguous(), torch.rand(576, generator=generator), Rope.of(1e4, 64, 50)
    torch.testing.assert_close(wide.rms_norm(x, weight, 1e-5), TorchOperations().rms_norm(x, weight, 1e-5))
    turned, expected = q.clone(), q.clone()
    wide.rope_(turned, rope, positions)
    TorchOperations().rope_(expected, rope, positions)
    torch.testing.assert_close(turned, expected, rtol=1e-5, atol=1e-5)
