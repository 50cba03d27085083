import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.paged_attention import gather_context, paged_attention


@pytest.fixture
def pool():
    """Eight blocks of four slots, two key-value heads of eight features."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 8, 4, 2, 8, generator=generator).unbind(0)


def tables(*rows):
    return torch.tensor(rows, dtype=torch.int32)


def lengths(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_context_is_gathered_in_table_order(pool):
    k, _ = pool
    gathered = gather_context(k, tables([5, 0, 3])[0], 6)
    assert torch.equal(gathered, torch.cat((k[5], k[0, :2])))


def test_agrees_with_dense_attention(pool):
    k, v = pool
    q = torch.randn(1, 6, 8)
    out = paged_attention(q, k, v, tables([2, 7, 1]), lengths(11), scale=0.3)
    dense_k, dense_v = (torch.cat((cache[2], cache[7], cache[1]))[:11].transpose(0, 1) for cache in (k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q[0].unsqueeze(1), dense_k, dense_v, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(out[0], expected.squeeze(1))


def test_one_position_returns_its_value(pool):
    k, v = pool
    out = paged_attention(torch.randn(1, 2, 8), k, v, tables([4]), lengths(1), scale=1.0)
    torch.testing.assert_close(out[0], v[4, 0])


def test_padding_row_is_zeros_and_its_table_is_not_read(pool):
    k, v = pool
    out = paged_attention(torch.randn(2, 2, 8), k, v, tables([9999], [1]), lengths(0, 4), scale=1.0)
    assert torch.equal(out[0], torch.zeros(2, 8))
    assert out[1].abs().sum() > 0


@settings(deadline=None, max_examples=20)
@given(length=st.integers(1, 32), seed=st.integers(0, 1000))
def test_block_placement_does_not_matter(length, seed):
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, 8, 4, 2, 8, generator=generator).unbind(0)
    q = torch.randn(1, 4, 8, generator=generator)
    order = torch.randperm(8, generator=generator)
    straight = paged_attention(q, k, v, tables(range(8)), lengths(length), scale=0.5)
    scattered = paged_attention(
        q, k[order.argsort()], v[order.argsort()], order[None].int(), lengths(length), scale=0.5
    )
    assert torch.equal(straight, scattered)
