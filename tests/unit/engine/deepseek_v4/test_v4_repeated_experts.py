"""A token whose experts repeat: two of its rows go through one expert, also where the token is alone."""

import pytest
import torch
from tiny_v4 import WIDTHS, RandomTensors, ids_of, run_chunks, tiny_config

from engine.model.deepseek.moe import Routes
from engine.model.deepseek_v4.model import DeepseekV4Model
from engine.model.deepseek_v4.routing import HashedExperts
from kernels.operations import select_operations
from kernels.torch_operations import TorchOperations

TABLES = {"zeros": [[0, 0]], "twice": [[1, 1]], "some twice": [[1, 1], [2, 1], [1, 3], [3, 3]]}


class Repeated(RandomTensors):
    def __init__(self, rows):
        self._rows = torch.tensor(rows).float()

    def take(self, name, shape):
        if not name.endswith("tid2eid"):
            return super().take(name, shape)
        return self._rows.repeat(-(-shape[0] // len(self._rows)), 1)[: shape[0]]


@pytest.fixture(params=["c", "torch"])
def kind(request, cpu_library):
    return request.param


@pytest.mark.parametrize("profile", ["exact", "fast"])
@pytest.mark.parametrize("rows", TABLES.values(), ids=TABLES)
@torch.inference_mode()
def test_each_occurrence_counts_for_any_number_of_rows(kind, rows, profile):
    """Against the outputs of each expert by itself, which know no neighbour, and row by row."""
    operations = select_operations(1, kind, profile)
    experts = HashedExperts(tiny_config(), Repeated(rows), operations, "f")
    x_TC, ids_T = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)), torch.arange(64)
    one_by_one = TorchOperations(profile)
    slow = HashedExperts(tiny_config(), Repeated(rows), one_by_one, "f")
    routes = slow._router(one_by_one, x_TC, ids_T)
    apart = []
    for slot in range(2):
        alone = Routes(routes.experts[:, slot : slot + 1], routes.weights[:, slot : slot + 1])
        weighted_T1C, shared_TC = slow._experts.by_slot(one_by_one, x_TC, alone)
        apart.append(weighted_T1C[:, 0])
    together = experts(operations, x_TC, ids_T)
    torch.testing.assert_close(together, apart[0] + apart[1] + shared_TC, rtol=1e-4, atol=1e-4)
    for count in (1, 2, 3, 17):
        for start in (0, 5, 64 - count):
            part = slice(start, start + count)
            found = experts(operations, x_TC[part].clone(), ids_T[part])
            assert torch.equal(found, together[part]), (count, start)


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("rows", TABLES.values(), ids=TABLES)
@torch.inference_mode()
def test_one_token_at_a_time_gives_the_bits_of_the_full_pass(kind, rows, widths):
    config, ids = tiny_config(**WIDTHS[widths]), ids_of(40)
    model = DeepseekV4Model(config, Repeated(rows), select_operations(1, kind))
    full = model.logits(ids)
    for chunk in (1, 3):
        assert torch.equal(model.head(run_chunks(model, ids, chunk)), full)
