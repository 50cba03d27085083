import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.q4_1_gemv import dequantise_q4_1, q4_1_gemv


def random_blocks(outputs, blocks, seed=0):
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (outputs, blocks, 20), dtype=torch.uint8, generator=generator)
    header = torch.randn(outputs, blocks, 2, generator=generator).to(torch.float16)
    raw[..., :4] = header.view(torch.uint8)
    return raw


def test_nibble_order():
    raw = torch.zeros(1, 1, 20, dtype=torch.uint8)
    raw[..., :4] = torch.tensor([2.0, -1.0], dtype=torch.float16).view(torch.uint8)
    raw[0, 0, 4] = 0x5C  # element 0 is the low nibble, element 16 the high one
    weights = dequantise_q4_1(raw)[0]
    assert weights[0] == 2 * 0xC - 1
    assert weights[16] == 2 * 0x5 - 1
    assert weights[1] == -1


def test_agrees_with_the_gguf_package():
    gguf = pytest.importorskip("gguf")
    raw = random_blocks(5, 3)
    theirs = gguf.dequantize(raw.flatten(1).numpy(), gguf.GGMLQuantizationType.Q4_1)
    assert np.array_equal(dequantise_q4_1(raw).numpy(), theirs)


@settings(deadline=None, max_examples=20)
@given(rows=st.integers(0, 5), outputs=st.integers(1, 9), blocks=st.integers(1, 4), seed=st.integers(0, 99))
def test_product_is_that_of_the_dequantised_weight(rows, outputs, blocks, seed):
    raw = random_blocks(outputs, blocks, seed)
    x = torch.randn(rows, 32 * blocks, generator=torch.Generator().manual_seed(seed))
    expected = x.double() @ dequantise_q4_1(raw).double().T
    torch.testing.assert_close(q4_1_gemv(x, raw).double(), expected, rtol=1e-4, atol=1e-3)


def test_wrong_width_is_refused():
    with pytest.raises(AssertionError):
        q4_1_gemv(torch.zeros(1, 64), random_blocks(2, 3))
