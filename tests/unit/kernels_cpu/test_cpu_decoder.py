"""The layers in one call give the bits of the single operations that they are made of."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.cpu.operations import CpuOperations
from kernels.cpu.packing import pack
from kernels.decoder import run_layers
from kernels.operations import DecoderLayer, DecoderStack, Profile, Rope, Rows, Weight, WeightFormat
from kernels.torch_operations import TorchOperations

LAYERS, CHANNELS, FEED_FORWARD, HEADS, KV_HEADS, D, BLOCK = 3, 96, 160, 6, 2, 32, 4
PROFILES: tuple[Profile, ...] = ("exact", "fast")


def random_weight(form: WeightFormat, rows: int, columns: int, generator: torch.Generator) -> Weight:
    if form == "f32":
        return Weight(torch.randn(rows, columns, generator=generator) / columns**0.5, rows, columns, form)
    size = 20 if form == "q4_1" else 34
    data = torch.randint(0, 256, (rows, columns // 32, size), generator=generator, dtype=torch.uint8)
    for header in (1, 3) if form == "q4_1" else (1,):
        data[..., header] = (data[..., header] & 0x83) | (0x20 if form == "q4_1" else 0x14)
    return Weight(data.flatten(1), rows, columns, form)


def stack_of(ops: CpuOperations | TorchOperations) -> DecoderStack:
    """Random layers in all formats, one product of mixed ones among them."""
    generator = torch.Generator().manual_seed(3)

    def weight(form: WeightFormat, rows: int, columns: int) -> Weight:
        return ops.prepare(random_weight(form, rows, columns, generator))

    def norm() -> Tensor:
        return 1 + 0.1 * torch.randn(CHANNELS, generator=generator)

    layers = [
        DecoderLayer(
            norm(), weight("q4_1", HEADS * D, CHANNELS), weight("f32", KV_HEADS * D, CHANNELS),
            weight("q8_0", KV_HEADS * D, CHANNELS), weight("q4_1", CHANNELS, HEADS * D), norm(),
            weight("q4_1", FEED_FORWARD, CHANNELS), weight("q8_0", FEED_FORWARD, CHANNELS),
            weight("q8_0", CHANNELS, FEED_FORWARD),
        )
        for _ in range(LAYERS)
    ]  # fmt: skip
    return DecoderStack(tuple(layers), Rope.of(1e4, D, 64), D, 1e-5)


def two_sequences() -> Rows:
    """Eleven rows of one sequence and six of another, their blocks mixed."""
    positions = torch.cat((torch.arange(11), torch.arange(6)))
    sequences = torch.cat((torch.zeros(11, dtype=torch.int64), torch.ones(6, dtype=torch.int64)))
    return Rows(positions, sequences, torch.tensor([[4, 0, 2], [3, 1, 0]], dtype=torch.int32))


def run(ops: CpuOperations | TorchOperations, composed: bool) -> tuple[Tensor, Tensor]:
    """Hidden states and the cache afterwards."""
    rows, stack = two_sequences(), stack_of(ops)
    x_TC = torch.randn(len(rows.positions), CHANNELS, generator=torch.Generator().manual_seed(4))
    cache = torch.zeros(LAYERS, 5, 2, BLOCK, KV_HEADS, D)
    run_it = (lambda *args: run_layers(ops, stack, *args)) if composed else ops.decoder(stack)
    return run_it(x_TC, rows, cache), cache


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("profile", PROFILES)
def test_one_call_gives_the_bits_of_the_single_operations(
    cpu_library: Path, profile: Profile, threads: int
) -> None:
    hidden, cache = run(CpuOperations(threads, profile), composed=False)
    expected, expected_cache = run(CpuOperations(1, profile), composed=True)
    assert torch.equal(hidden, expected)
    assert torch.equal(cache, expected_cache)


@pytest.mark.parametrize("profile", PROFILES)
def test_agrees_with_pytorch(cpu_library: Path, profile: Profile) -> None:
    hidden, cache = run(CpuOperations(1, profile), composed=False)
    expected, expected_cache = run(TorchOperations(profile), composed=False)
    # In `fast` one last bit can move an activation to the next of 65,535.
    tolerance = 1e-4 if profile == "exact" else 5e-4
    torch.testing.assert_close(hidden, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(cache, expected_cache, rtol=tolerance, atol=tolerance)


def test_no_rows_are_no_work(cpu_library: Path) -> None:
    ops = CpuOperations(1, "fast")
    rows = Rows(*(torch.zeros(0, dtype=torch.int64) for _ in range(2)), torch.zeros(1, 1, dtype=torch.int32))
    cache = torch.zeros(LAYERS, 5, 2, BLOCK, KV_HEADS, D)
    assert ops.decoder(stack_of(ops))(torch.zeros(0, CHANNELS), rows, cache).shape == (0, CHANNELS)
    assert float(cache.abs().max()) == 0.0


def test_a_weight_that_does_not_fit_the_stack_is_refused(cpu_library: Path) -> None:
    ops = CpuOperations(1, "fast")
    stack = stack_of(ops)
    layer = stack.layers[0]
    wrong = DecoderLayer(
        layer.attention_norm, layer.q, layer.k, layer.v, pack(layer.k), layer.feed_forward_norm, layer.gate,
        layer.up, layer.down,
    )  # fmt: skip
    with pytest.raises(ValueError, match="output: 64 rows, expected 96"):
        ops.decoder(DecoderStack((wrong,), stack.rope, D, 1e-5))
