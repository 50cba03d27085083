"""What is no number is never among the largest, with either kind of operations, and routes no row."""

import pytest
import torch
from golden_sets import RandomTensors
from hypothesis import given
from hypothesis import strategies as st
from test_fused_operations import SHAPE

from engine import numerics
from engine.model.deepseek.moe import MixtureOfExperts
from kernels.cpu.operations import CpuOperations
from kernels.operations import select_operations
from kernels.torch_operations import TorchOperations

SCORES = st.sampled_from([0.0, 1.0, 2.0, -1.0, torch.inf, -torch.inf, torch.nan])


@given(scores=st.lists(SCORES, min_size=1, max_size=9), k=st.integers(0, 10))
def test_the_largest_are_the_same_in_c_and_pytorch(cpu_library, scores, k):
    scores_1N = torch.tensor([scores])
    found = [numerics.top_k(scores_1N, k, ops).tolist() for ops in (CpuOperations(1), TorchOperations())]
    assert found[0] == found[1]
    assert all(scores[i] == scores[i] for i in found[0][0] if i >= 0)


def test_four_scores_of_which_two_are_none(cpu_library):
    scores = torch.tensor([[torch.nan, torch.nan, 1.0, 2.0]])
    for ops in (CpuOperations(1), TorchOperations()):
        assert numerics.top_k(scores, 2, ops).tolist() == [[2, 3]]


@pytest.mark.parametrize("kind", ["c", "torch"])
def test_a_row_that_is_no_numbers_has_no_experts(cpu_library, kind):
    operations = select_operations(1, kind)
    mixture = MixtureOfExperts(SHAPE, RandomTensors(), operations, "f", experts=9, experts_per_row=3)
    with pytest.raises(ValueError, match="activations are not numbers"):
        mixture(operations, torch.full((1, 80), torch.nan), None)
