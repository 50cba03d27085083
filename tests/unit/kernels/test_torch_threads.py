"""PyTorch's way: the number of threads changes no bit, and a row does not know how many come with it."""

import pytest
import torch

from kernels.operations import Weight
from kernels.torch_operations import TorchOperations

THREADS = (1, 2, 3, 4, 8)


@pytest.fixture
def on_threads():
    before = torch.get_num_threads()

    def run(call):
        found = []
        for threads in THREADS:
            torch.set_num_threads(threads)
            found.append(call())
        return found

    yield run
    torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [1, 16, 20, 24, 32, 36, 40, 64, 72, 100, 193, 200, 256])
@pytest.mark.parametrize("columns", [32, 576])
def test_products(on_threads, rows, columns):
    x, weight = torch.randn(17, columns), Weight(torch.randn(rows, columns), rows, columns, "f32")
    first, *more = on_threads(lambda: TorchOperations().linear(x, [weight])[0])
    assert all(torch.equal(first, other) for other in more)


def test_norms_of_wide_rows(on_threads):
    x, weight = torch.randn(3, 1 << 16), torch.randn(1 << 16)
    operations = TorchOperations()
    together = operations.rms_norm(x, weight, 1e-6)
    for alone in on_threads(lambda: torch.cat([operations.rms_norm(row[None], weight, 1e-6) for row in x])):
        assert torch.equal(alone, together)
