import cmath

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.rope import rope, rope_frequencies


def test_adjacent_pairs_turn_as_complex_numbers():
    theta, head_dim, position = 100.0, 6, 5
    x = torch.randn(1, 2, head_dim)
    out = rope(x, torch.tensor([position]), theta)
    for head in range(2):
        for pair in range(head_dim // 2):
            before = complex(*x[0, head, 2 * pair : 2 * pair + 2].tolist())
            turned = before * cmath.exp(1j * position * theta ** (-2 * pair / head_dim))
            after = complex(*out[0, head, 2 * pair : 2 * pair + 2].tolist())
            assert abs(after - turned) < 1e-5


@pytest.mark.parametrize("position", [31_999, 131_071, 1_048_575])
def test_far_positions_turn_by_exact_angles(position):
    """A float32 angle would be off by 1e-3 and more."""
    frequencies = rope_frequencies(64, 1e5, torch.device("cpu")).tolist()
    x = torch.randn(1, 1, 64)
    out = rope(x, torch.tensor([position]), 1e5)
    for pair, frequency in enumerate(frequencies):
        turned = complex(*x[0, 0, 2 * pair :][:2].tolist()) * cmath.exp(1j * position * frequency)
        assert abs(complex(*out[0, 0, 2 * pair :][:2].tolist()) - turned) < 1e-6


def test_position_zero_changes_nothing():
    x = torch.randn(3, 2, 8)
    assert torch.equal(rope(x, torch.zeros(3, dtype=torch.int32), 1e4), x)


@settings(deadline=None, max_examples=25)
@given(first=st.integers(0, 2000), second=st.integers(0, 2000), shift=st.integers(0, 2000))
def test_scores_depend_on_distance_only(first, second, shift):
    generator = torch.Generator().manual_seed(first)
    q, k = torch.randn(2, 1, 1, 16, generator=generator).unbind(0)

    def score(q_position, k_position):
        turned_q = rope(q, torch.tensor([q_position]), 1e4)
        return (turned_q * rope(k, torch.tensor([k_position]), 1e4)).sum()

    torch.testing.assert_close(
        score(first, second), score(first + shift, second + shift), atol=5e-3, rtol=1e-4
    )


def test_type_is_kept_and_length_is_kept():
    x = torch.randn(4, 3, 8).to(torch.float16)
    out = rope(x, torch.arange(4), 1e4)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out.float().norm(dim=-1), x.float().norm(dim=-1), rtol=2e-3, atol=2e-3)
