"""What C would read as foreign memory, or as something else than it is, is a ValueError that names it."""

import pytest
import torch

from engine.config import EngineConfig
from engine.model.registry import load_model
from kernels.cpu.operations import CpuOperations
from kernels.fused import EntrySource, RecordLayout
from kernels.operations import Weight, select_operations
from protocol.errors import InvalidInput


@pytest.fixture
def operations(cpu_library):
    return CpuOperations(1)


@pytest.mark.parametrize("x", [
    torch.zeros(2, 32, device="meta"), torch._neg_view(torch.ones(2, 32)), torch.zeros(2, 32).to_sparse(),
], ids=["on no device", "negative view", "sparse"])  # fmt: skip
def test_memory_that_is_not_there_or_means_something_else(operations, x):
    with pytest.raises((ValueError, NotImplementedError, RuntimeError)):
        operations.linear(x, [Weight(torch.zeros(4, 32), 4, 32, "f32")])
    if x.layout is torch.strided:
        with pytest.raises(ValueError, match=r"^x: "):
            operations.rms_norm(x, torch.ones(32), 1e-6)
        with pytest.raises(ValueError, match=r"^weight: "):
            operations.linear(torch.zeros(2, 32), [Weight(x, 2, 32, "f32")])


@pytest.mark.parametrize("form", ["f32", "bf16"])
def test_weights_of_floats_are_never_packed(operations, form):
    data = torch.zeros(1, 32 * 32, dtype=torch.float32 if form == "f32" else torch.bfloat16)
    with pytest.raises(ValueError, match=f"weight: {form} has no packed form"):
        operations.linear(torch.zeros(2, 32), [Weight(data, 32, 32, form, packed=True)])


@pytest.mark.parametrize(("index", "first", "name"), [
    (torch.tensor([[-(2**40)]]), -(2**40), "first"), (torch.zeros(1, 1).long().to("meta"), 0, "index"),
    (torch._neg_view(torch.tensor([[1]])), 0, "index"),
])  # fmt: skip
def test_entries_before_their_pool(operations, index, first, name):
    source = EntrySource(torch.zeros(4, 16), index, first)
    with pytest.raises(ValueError, match=f"^{name}"):
        operations.fused.attend(torch.zeros(1, 1, 16), [source], torch.zeros(1), 1.0, None)


@pytest.mark.parametrize(("fields", "name"), [
    ({"group": -32}, "group"), ({"group": 0}, "group"), ({"rotary": -4}, "rotary"),
    ({"channels": -64}, "channels"),
])  # fmt: skip
def test_records_of_no_size(operations, fields, name):
    layout = RecordLayout(**{
        "channels": 64, "group": 32, "width": 128, "codes": "e4m3", "scales": "e8m0", "largest": 448.0,
        "least": 1e-4, **fields,
    })  # fmt: skip
    with pytest.raises(ValueError, match=rf"layout\.{name} is -?\d+"):
        operations.fused.encode(layout, torch.zeros(1, max(0, layout.channels + layout.rotary)))


@pytest.mark.parametrize("threads", [0, -1, 10**6, 1.5, True, "2", None])
@pytest.mark.parametrize("kind", ["auto", "torch"])
def test_threads_that_no_process_can_have(threads, kind):
    with pytest.raises(InvalidInput, match=r"threads is .*, expected a whole number from 1 to 1024"):
        select_operations(threads, kind)
    with pytest.raises(InvalidInput, match="threads is "):
        load_model("nano", threads=threads, operations=kind)


@pytest.mark.parametrize("threads", [0, 1025])
def test_an_engine_of_so_many_threads_is_refused_by_its_config(threads):
    with pytest.raises(ValueError, match="threads"):
        EngineConfig(threads=threads)
