"""The C library: a row's bits depend on nothing but that row, and agree with PyTorch's to 1e-4."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Format
from torch import Tensor

from kernels.cpu import build as build_module
from kernels.cpu.build import build, library_path
from kernels.cpu.operations import CpuOperations
from kernels.operations import Rope, Rows, Weight, WeightFormat, select_operations
from kernels.torch_operations import TorchOperations, dequantize
from protocol.errors import MissingCapability

COUNTS = [1, 2, 3, 7, 8, 15, 16, 17, 64, 512]
FORMATS: dict[WeightFormat, Format] = {"f32": Format.F32, "q4_1": Format.Q4_1, "q8_0": Format.Q8_0}
BLOCK, KV_HEADS, HEADS, D = 16, 3, 9, 64
Call = Callable[[Any, Tensor], Tensor]


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def operations(request: pytest.FixtureRequest, cpu_library: Path) -> CpuOperations:
    return CpuOperations(request.param)


def weight(form: WeightFormat, rows: int, columns: int, seed: int = 0) -> Weight:
    values = np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32) / columns**0.5
    data = values if form == "f32" else gguf.quants.quantize(values, FORMATS[form])
    return Weight(torch.from_numpy(data), rows, columns, form)


def rows_of(count: int, columns: int, seed: int = 1) -> Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(seed))


def linear(form: WeightFormat, rows: int, columns: int) -> Call:
    weights = (weight(form, rows, columns), weight(form, 7, columns, seed=5))
    return lambda ops, x: torch.cat(ops.linear(x[:, :columns], weights), 1)


def silu_mul(ops: Any, x: Tensor) -> Tensor:
    return ops.silu_mul(x[:, :576].contiguous() * 20, x[:, 576:1152].contiguous())


def rms_norm(ops: Any, x: Tensor) -> Tensor:
    return ops.rms_norm(x[:, :576].contiguous(), rows_of(1, 576, 3)[0], 1e-5)


CALLS: dict[str, Call] = {
    **{f"linear {form}": linear(form, 193, 576) for form in FORMATS},
    "linear q4_1 wide": linear("q4_1", 30, 1536),
    "rms_norm": rms_norm,
    "silu_mul": silu_mul,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_row_does_not_know_its_neighbours(operations: CpuOperations, call: Call) -> None:
    x = rows_of(max(COUNTS), 1536)
    alone = torch.cat([call(CpuOperations(1), x[row : row + 1].clone()) for row in range(len(x))])
    for count in COUNTS:
        assert torch.equal(call(operations, x[:count].clone()), alone[:count]), count
        assert torch.equal(call(operations, x[-count:].clone()), alone[-count:]), count


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_agrees_with_the_reference(operations: CpuOperations, call: Call) -> None:
    x = rows_of(17, 1536)
    torch.testing.assert_close(
        call(operations, x.clone()), call(TorchOperations(), x.clone()), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("form", FORMATS)
def test_gather_gives_the_weights_exactly(operations: CpuOperations, form: WeightFormat) -> None:
    table = weight(form, 50, 576)
    ids = torch.tensor([49, 0, 7, 7])
    reference = TorchOperations().gather(table, ids)
    torch.testing.assert_close(operations.gather(table, ids), reference, rtol=1e-6, atol=1e-6)
    assert torch.equal(reference, dequantize(table)[ids])


@pytest.mark.parametrize("form", ["q4_1", "q8_0"])
def test_dequantising_is_as_the_format_says(form: WeightFormat) -> None:
    table = weight(form, 5, 576)
    expected = gguf.quants.dequantize(table.data.numpy(), FORMATS[form])
    torch.testing.assert_close(dequantize(table), torch.from_numpy(expected), rtol=1e-6, atol=1e-6)


def test_silu_stands_extreme_values(operations: CpuOperations) -> None:
    gate = torch.tensor([[-200.0, -88.0, -1e-30, 0.0, 1e-30, 88.0, 200.0, 3e38] * 4])
    result = operations.silu_mul(gate.clone(), torch.ones_like(gate))
    torch.testing.assert_close(result, torch.nn.functional.silu(gate), rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("columns", [31, 33, 16416])
def test_columns_that_the_kernel_cannot_take_are_refused(operations: CpuOperations, columns: int) -> None:
    x, w = torch.zeros(1, columns), Weight(torch.zeros(4, columns), 4, columns, "f32")
    with pytest.raises(ValueError, match=f"{columns} columns"):
        operations.linear(x, (w,))


# ---------------------------------------------------------------- attention over a paged cache
def layout(lengths: list[int], seed: int = 2) -> tuple[Rows, int]:
    """Rows for every position of some sequences, their blocks scattered over the pool."""
    blocks = [-(-length // BLOCK) for length in lengths]
    pool = torch.randperm(sum(blocks) + 3, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
    taken = 0
    for sequence, count in enumerate(blocks):
        tables[sequence, :count] = pool[taken : taken + count]
        taken += count
    positions = torch.cat([torch.arange(length) for length in lengths])
    sequences = torch.cat([torch.full((length,), index) for index, length in enumerate(lengths)])
    return Rows(positions, sequences, tables), len(pool)


def select(rows: Rows, which: Tensor) -> Rows:
    return Rows(rows.positions[which].clone(), rows.sequences[which].clone(), rows.tables)


def filled_cache(ops: Any, rows: Rows, num_blocks: int) -> Tensor:
    """NaN wherever nothing was written, so that reading beyond a row's position shows."""
    cache = torch.full((num_blocks, 2, BLOCK, KV_HEADS, D), torch.nan)
    count = len(rows.positions)
    k, v = (rows_of(count, KV_HEADS * D, seed).view(count, KV_HEADS, D) for seed in (4, 5))
    ops.store_kv(cache, rows, k, v)
    return cache


def test_attention_rows_do_not_know_their_neighbours(operations: CpuOperations) -> None:
    rows, num_blocks = layout([1, 16, 17, 490])
    cache = filled_cache(operations, rows, num_blocks)
    q = rows_of(len(rows.positions), HEADS * D).view(-1, HEADS, D)
    one = CpuOperations(1)
    alone = torch.cat(
        [
            one.paged_attention(q[r : r + 1].clone(), cache, select(rows, torch.tensor([r])), 0.125)
            for r in range(len(q))
        ]
    )
    for count in COUNTS:
        which = torch.randperm(len(q), generator=torch.Generator().manual_seed(count))[:count]
        got = operations.paged_attention(q[which].clone(), cache, select(rows, which), 0.125)
        assert torch.equal(got, alone[which]), count


def test_attention_does_not_depend_on_where_blocks_lie(operations: CpuOperations) -> None:
    outputs: list[Tensor] = []
    for seed in (2, 3):
        rows, num_blocks = layout([5, 40], seed)
        cache = filled_cache(operations, rows, num_blocks)
        q = rows_of(45, HEADS * D).view(-1, HEADS, D)
        outputs.append(operations.paged_attention(q, cache, rows, 0.125))
    assert torch.equal(*outputs)


def test_attention_agrees_with_the_reference(operations: CpuOperations) -> None:
    rows, num_blocks = layout([1, 16, 300])
    cache, expected = (filled_cache(ops, rows, num_blocks) for ops in (operations, TorchOperations()))
    assert torch.equal(cache.nan_to_num(), expected.nan_to_num())
    some = select(rows, torch.tensor([0, 1, 15, 16, 17, 32, 33, 49, 200, 316]))
    q = 3 * rows_of(10, HEADS * D).view(-1, HEADS, D)
    torch.testing.assert_close(
        operations.paged_attention(q, cache, some, 0.125),
        TorchOperations().paged_attention(q, cache, some, 0.125),
        rtol=1e-4, atol=1e-4,
    )  # fmt: skip


def test_rope_turns_each_row_by_its_own_position(operations: CpuOperations) -> None:
    rope = Rope.of(10_000.0, D, 100)
    x = rows_of(17, HEADS * D).view(17, HEADS, D)
    positions = torch.randperm(100, generator=torch.Generator().manual_seed(7))[:17]
    turned, expected = x.clone(), x.clone()
    operations.rope_(turned, rope, positions)
    TorchOperations().rope_(expected, rope, positions)
    torch.testing.assert_close(turned, expected, rtol=1e-5, atol=1e-5)
    for row in range(17):
        alone = x[row : row + 1].clone()
        operations.rope_(alone, rope, positions[row : row + 1])
        assert torch.equal(alone[0], turned[row])


# ---------------------------------------------------------------- which library runs
def test_building_again_gives_the_same_file(cpu_library: Path) -> None:
    before = cpu_library.stat().st_mtime_ns
    assert build() == cpu_library == library_path()
    assert cpu_library.stat().st_mtime_ns == before


def test_operations_are_chosen_by_name(cpu_library: Path) -> None:
    assert [select_operations(1, kind).name for kind in ("auto", "c", "torch")] == ["c", "c", "torch"]


def test_a_library_that_is_not_built_is_missed_loudly(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("kernels.cpu.library.library_path", lambda: tmp_path / "none.so")
    assert select_operations(1, "auto").name == "torch"
    with pytest.raises(MissingCapability, match="not built"):
        select_operations(1, "c")


def test_without_a_compiler_the_build_says_what_it_costs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build_module, "library_path", lambda: tmp_path / "build" / "none.so")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingCapability, match="no C compiler"):
        build()


def test_what_lies_outside_a_table_never_reaches_c(operations):
    """C would read foreign memory."""
    rope = Rope.of(10_000.0, 32, 8)
    x = torch.zeros(1, 2, 32)
    for position in (8, -1):
        with pytest.raises(AssertionError):
            operations.rope_(x, rope, torch.tensor([position]))
    cache = torch.zeros(2, 2, 4, 1, 32)

    def rows(position: int, sequence: int, block: int) -> Rows:
        tables = torch.tensor([[0, block]], dtype=torch.int32)
        return Rows(torch.tensor([position]), torch.tensor([sequence]), tables)

    k = torch.zeros(1, 1, 32)
    operations.store_kv(cache, rows(7, 0, 1), k, k)
    for outside in (rows(8, 0, 1), rows(0, 1, 1), rows(7, 0, 2), rows(7, 0, -1)):
        with pytest.raises(AssertionError):
            operations.store_kv(cache, outside, k, k)
