import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.rms_norm import rms_norm


def test_known_answer():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    # mean square 12.5, so 3 and 4 over its root; a zero row stays zero thanks to eps.
    expected = torch.tensor([[3 / 12.5**0.5, 2 * 4 / 12.5**0.5], [0.0, 0.0]])
    torch.testing.assert_close(rms_norm(x, torch.tensor([1.0, 2.0]), 1e-12), expected)


def test_agrees_with_torch():
    x, weight = torch.randn(7, 33), torch.randn(33)
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-5), torch.nn.functional.rms_norm(x, (33,), weight, 1e-5)
    )


def test_low_precision_input_is_rounded_once():
    x, weight = torch.randn(3, 64).to(torch.bfloat16), torch.randn(64)
    exact = rms_norm(x.to(torch.float32), weight, 1e-5)
    assert torch.equal(rms_norm(x, weight, 1e-5), exact.to(torch.bfloat16))


@settings(deadline=None, max_examples=25)
@given(scale=st.floats(1e-3, 1e3), seed=st.integers(0, 100))
def test_scale_of_a_row_does_not_matter(scale, seed):
    x = torch.randn(2, 16, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(
        rms_norm(x * scale, torch.ones(16), 0.0), rms_norm(x, torch.ones(16), 0.0), rtol=1e-5, atol=1e-6
    )
