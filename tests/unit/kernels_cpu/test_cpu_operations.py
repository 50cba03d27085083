"""The C library: a row's bits depend on nothing but that row, and agree with PyTorch's to 1e-4."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Format
from torch import Tensor

from kernels import operations as operations_module
from kernels.cpu import build as build_module
from kernels.cpu.build import build, library_path
from kernels.cpu.operations import CpuOperations
from kernels.limits import MAX_COLUMNS
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


@pytest.mark.parametrize("columns", [31, 33, MAX_COLUMNS + 32])
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


def test_pytorch_in_place_of_the_library_is_said_once_in_the_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kernels.cpu.library.library_path", lambda: tmp_path / "nothing.so")
    operations_module._say_that_it_is_slow.cache_clear()
    before = torch.get_num_threads()
    try:
        assert {select_operations(1, profile="fast").name for _ in range(3)} == {"torch"}
        assert select_operations(1, "torch", "fast").name == "torch"
    finally:
        torch.set_num_threads(before)
        operations_module._say_that_it_is_slow.cache_clear()
    (line,) = [record.getMessage() for record in caplog.records if record.name == "kernels.operations"]
    assert "profile fast, many times slower; run: make setup" in line


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
        with pytest.raises(ValueError, match="positions"):
            operations.rope_(x, rope, torch.tensor([position]))
    cache = torch.zeros(2, 2, 4, 1, 32)

    def rows(position: int, sequence: int, block: int) -> Rows:
        tables = torch.tensor([[0, block]], dtype=torch.int32)
        return Rows(torch.tensor([position]), torch.tensor([sequence]), tables)

    k = torch.zeros(1, 1, 32)
    operations.store_kv(cache, rows(7, 0, 1), k, k)
    for name, outside in (
        ("positions", rows(8, 0, 1)), ("sequences", rows(0, 1, 1)), ("tables", rows(7, 0, 2)),
        ("tables", rows(7, 0, -1)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=name):
            operations.store_kv(cache, outside, k, k)
    with pytest.raises(ValueError, match=r"ids: -1\.\.3 are not all in 0\.\.7"):
        operations.gather(weight("f32", 8, 32), torch.tensor([3, -1]))


def test_rope_far_away_is_the_reference(operations: CpuOperations) -> None:
    rope, positions = Rope.of(100_000.0, D, 131_072), torch.tensor([7, 8191, 31_999, 131_071])
    turned = rows_of(4, HEADS * D).view(4, HEADS, D)
    expected = turned.clone()
    operations.rope_(turned, rope, positions)
    TorchOperations().rope_(expected, rope, positions)
    torch.testing.assert_close(turned, expected, rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------- operands that C would misread
WIDE = rows_of(8, 128)
EVERY_SECOND = torch.arange(16)[::2]
CACHE, K = torch.zeros(2, 2, 4, 2, 32), torch.zeros(8, 2, 32)
PLACES = (torch.zeros(8, dtype=torch.int64), torch.zeros(8, dtype=torch.int64), torch.zeros(1, 1).int())
ROPE = Rope.of(10_000.0, 32, 20)


def swapped(which: int, other: Tensor) -> Rows:
    return Rows(*(other if place == which else PLACES[place] for place in range(3)))


MISREAD: dict[str, tuple[str, Callable[[CpuOperations], object]]] = {
    "columns of a weight": (
        "weight",
        lambda ops: ops.linear(WIDE[:, :64], [Weight(WIDE[:, :64], 8, 64, "f32")]),
    ),
    "a weight of other rows": ("weight", lambda ops: ops.linear(WIDE, [Weight(WIDE, 9, 128, "f32")])),
    "a weight of doubles": ("weight", lambda ops: ops.linear(WIDE, [Weight(WIDE.double(), 8, 128, "f32")])),
    "rows of doubles": ("x", lambda ops: ops.linear(WIDE.double(), [weight("f32", 8, 128)])),
    "columns of a table": ("table", lambda ops: ops.gather(Weight(WIDE[:, ::2], 8, 64, "f32"), PLACES[0])),
    "ids of int32": ("ids", lambda ops: ops.gather(Weight(WIDE, 8, 128, "f32"), PLACES[0].int())),
    "ids apart": ("ids", lambda ops: ops.gather(Weight(WIDE, 8, 128, "f32"), EVERY_SECOND)),
    "half a gate": ("gate", lambda ops: ops.silu_mul(*WIDE.chunk(2, 1))),
    "half an up": ("up", lambda ops: ops.silu_mul(WIDE[:, :64].contiguous(), WIDE[:, 64:])),
    "an up of 16 bits": ("up", lambda ops: ops.silu_mul(WIDE, WIDE.half())),
    "half a row": ("x", lambda ops: ops.rms_norm(WIDE[:, :64], torch.ones(64), 1e-5)),
    "a norm apart": ("weight", lambda ops: ops.rms_norm(WIDE, torch.ones(256)[::2], 1e-5)),
    "a norm of bfloat16": ("weight", lambda ops: ops.rms_norm(WIDE, torch.ones(128).bfloat16(), 1e-5)),
    "heads of a wider row": ("x", lambda ops: ops.rope_(WIDE.view(8, 2, 64)[..., :32], ROPE, PLACES[0])),
    "positions of int32": ("positions", lambda ops: ops.rope_(WIDE.view(8, 4, 32), ROPE, PLACES[0].int())),
    "positions apart": ("positions", lambda ops: ops.rope_(WIDE.view(8, 4, 32), ROPE, EVERY_SECOND)),
    "another table": ("rope.table", lambda ops: ops.rope_(WIDE.view(8, 2, 64), ROPE, PLACES[0])),
    "keys of a wider row": (
        "k",
        lambda ops: ops.store_kv(CACHE, Rows(*PLACES), K.repeat(1, 2, 1)[:, ::2], K),
    ),
    "values of doubles": ("v", lambda ops: ops.store_kv(CACHE, Rows(*PLACES), K, K.double())),
    "half a cache": ("cache", lambda ops: ops.store_kv(CACHE[:, :, ::2], Rows(*PLACES), K, K)),
    "tables of int64": ("tables", lambda ops: ops.store_kv(CACHE, swapped(2, PLACES[2].long()), K, K)),
    "tables apart": (
        "tables",
        lambda ops: ops.store_kv(CACHE, swapped(2, torch.zeros(3, 4).int()[:, ::2]), K, K),
    ),
    "sequences of int32": ("sequences", lambda ops: ops.store_kv(CACHE, swapped(1, PLACES[0].int()), K, K)),
    "fewer sequences": ("sequences", lambda ops: ops.store_kv(CACHE, swapped(1, PLACES[0][:7]), K, K)),
    "query positions apart": (
        "positions",
        lambda ops: ops.paged_attention(K, CACHE, swapped(0, EVERY_SECOND), 1.0),
    ),
    "queries apart": (
        "q",
        lambda ops: ops.paged_attention(K.repeat(1, 2, 1)[:, ::2], CACHE, Rows(*PLACES), 1.0),
    ),
    "queries of 16 bits": ("q", lambda ops: ops.paged_attention(K.half(), CACHE, Rows(*PLACES), 1.0)),
    "a cache of doubles": ("cache", lambda ops: ops.paged_attention(K, CACHE.double(), Rows(*PLACES), 1.0)),
    "uneven heads": (
        "heads",
        lambda ops: ops.paged_attention(torch.zeros(8, 3, 32), CACHE, Rows(*PLACES), 1.0),
    ),
}


@pytest.mark.parametrize("case", MISREAD)
def test_what_c_would_misread_is_refused_by_name(operations: CpuOperations, case: str) -> None:
    name, call = MISREAD[case]
    with pytest.raises(ValueError, match=f"^{name}"):
        call(operations)


def test_rows_that_lie_apart_are_multiplied_as_they_are(operations: CpuOperations) -> None:
    """`linear` alone takes them, by a copy."""
    w = weight("f32", 8, 64)
    assert torch.equal(
        operations.linear(WIDE[:, :64], [w])[0], operations.linear(WIDE[:, :64].clone(), [w])[0]
    )


def test_checks_hold_without_assertions(cpu_library: Path) -> None:
    """`python -O` leaves assertions out."""
    program = """
import torch
from kernels.cpu.operations import CpuOperations
assert False
try:
    CpuOperations(1).silu_mul(*torch.zeros(8, 128).chunk(2, 1))
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-O", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("gate: torch.float32 [8, 64], not contiguous")
