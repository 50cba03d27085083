"""Heads, head sizes and windows of any width: a row's bits do not depend on where its matrices lie."""

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine import numerics
from engine.model.deepseek.core_attention import Entries, attend_composed
from engine.model.deepseek.records import PlainRecord
from engine.model.deepseek_v4.heavy_attention import Compressed, HeavyAttention, Visible
from kernels.torch_operations import TorchOperations

ROWS = 33
PARTS = [slice(0, 1), slice(1, 2), slice(7, 9), slice(5, 20), slice(ROWS - 3, ROWS)]


def _randn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@given(t=st.integers(1, 9), k=st.integers(1, 90), n=st.integers(1, 90))
@example(t=3, k=34, n=32)
@settings(max_examples=60, deadline=None)
@torch.inference_mode()
def test_products_of_any_widths(t, k, n):
    a, b, keys = _randn(ROWS, t, k), _randn(ROWS, k, n), _randn(ROWS, n, k)
    for right in (b, keys.transpose(1, 2)):
        together = numerics.batched_product(a, right)
        torch.testing.assert_close(together, torch.bmm(a, right), rtol=1e-4, atol=1e-4)
        for part in PARTS:
            assert torch.equal(numerics.batched_product(a[part], right[part]), together[part])


@given(heads=st.integers(1, 7), d=st.integers(1, 45).map(lambda half: 2 * half), width=st.integers(1, 50))
@example(heads=3, d=34, width=30)
@settings(max_examples=40, deadline=None)
@torch.inference_mode()
def test_attention_of_any_widths(heads, d, width):
    pool = torch.cat((torch.zeros(1, d), _randn(90, d)))
    index = torch.randint(0, 91, (ROWS, width), generator=torch.Generator().manual_seed(1))
    q, sinks, counts = _randn(ROWS, heads, d), _randn(heads), torch.arange(ROWS) * 2
    heavy, operations = HeavyAttention(sinks, 0.1), TorchOperations()

    def near(part):
        return attend_composed(q[part], [Entries(pool, index[part])], sinks, 0.1)

    def far(part):
        seen = Visible(slice(0, len(q[part])), torch.arange(int(counts[part].max())), counts[part])
        compressed = Compressed(pool, PlainRecord(d), [seen])
        return heavy._composed(operations, q[part], Entries(pool, index[part]), compressed)

    for run in (near, far):
        together = run(slice(0, ROWS))
        assert all(torch.equal(run(part), together[part]) for part in PARTS)
