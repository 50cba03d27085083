"""What a llama-family model asks of a device: a handful of operations behind one interface.

Contract of every implementation: a row's bits depend on that row's inputs alone, whatever rows come along
with it, so that full, chunked, batched and incremental runs of a model agree bit for bit.
Shapes: M rows (T in a step), K columns in, N columns out, C channels, H heads, G KV heads, D head size.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from kernels.limits import MAX_THREADS
from kernels.rope import rope_frequencies

if TYPE_CHECKING:
    from kernels.fused import FusedOperations

WeightFormat = Literal["f32", "bf16", "q4_1", "q8_0", "mxfp4", "mxfp8"]
Profile = Literal["exact", "fast"]


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix [rows, columns] as its file stores it: uint8 [rows, row_bytes], or float32 or bfloat16 [N, K].

    MXFP4 and MXFP8 (kernels/whole_numbers.py) are for integer products alone.
    Packed, it is uint8 [ceil(rows / 32), 32 row_bytes] in the order of kernels/cpu/packing.py.
    """

    data: Tensor
    rows: int
    columns: int
    format: WeightFormat
    packed: bool = False


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the rows of one step stand: row r is position `positions[r]` of sequence `sequences[r]`."""

    positions: Tensor  # int64 [M]
    sequences: Tensor  # int64 [M], row numbers of `tables`
    tables: Tensor  # int32 [num_sequences, width], cache blocks in order of position


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary embedding: its base, and cos and sin of each position's angles, interleaved, [P, D]."""

    theta: float
    table: Tensor

    @classmethod
    def of(cls, theta: float, head_channels: int, num_positions: int) -> "Rope":
        """Angles are taken in float64 and rounded once."""
        frequencies = rope_frequencies(head_channels, theta, torch.device("cpu")).double()
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float64), frequencies)
        return cls(theta, torch.stack((angles.cos(), angles.sin()), -1).flatten(1).float().contiguous())


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer, prepared; norms are float32 [C]."""

    attention_norm: Tensor
    q: Weight
    k: Weight
    v: Weight
    output: Weight
    feed_forward_norm: Tensor
    gate: Weight
    up: Weight
    down: Weight


@dataclass(frozen=True, slots=True)
class DecoderStack:
    """Layers of one shape, and what they share."""

    layers: tuple[DecoderLayer, ...]
    rope: Rope
    head_channels: int
    norm_eps: float


class Decoder(Protocol):
    """The layers of a stack, ready to run."""

    def __call__(self, x_TC: Tensor, rows: Rows, cache: Tensor) -> Tensor:
        """Run the rows through all layers, writing their KV into `cache`; the result may lie in `x_TC`.

        cache: [layers, blocks, 2 (key, value), block, G, D]. A row's own entry is written before any row
        attends, so rows of one sequence may come in one call, in any number.
        """
        ...


class Operations(Protocol):
    """float32 on one device. Not thread-safe; every call blocks until its result is there."""

    name: str
    profile: Profile

    @property
    def fused(self) -> "FusedOperations | None":
        """What runs as one call, or None: then models compose it of what is below."""
        ...

    def prepare(self, weight: Weight) -> Weight:
        """A weight as `linear` reads it fastest, made once, at load. `gather` takes it unprepared."""
        ...

    def gather(self, table: Weight, ids: Tensor) -> Tensor:
        """Rows `ids` (int64 [M]) of the table, [M, K]."""
        ...

    def linear(self, x_MK: Tensor, weights: Sequence[Weight]) -> list[Tensor]:
        """x times each weight's transpose: one [M, N] a weight."""
        ...

    def rms_norm(self, x_MK: Tensor, weight_K: Tensor, eps: float) -> Tensor: ...

    def rope_(self, x_MHD: Tensor, rope: Rope, positions_M: Tensor) -> None:
        """Rotates adjacent pairs in place."""
        ...

    def silu_mul(self, gate_MK: Tensor, up_MK: Tensor) -> Tensor: ...

    def store_kv(self, cache: Tensor, rows: Rows, k_MGD: Tensor, v_MGD: Tensor) -> None:
        """Writes the rows' entries; cache is one layer, [blocks, 2, block, G, D]."""
        ...

    def paged_attention(self, q_MHD: Tensor, cache: Tensor, rows: Rows, scale: float) -> Tensor:
        """Causal attention of each row over positions 0..its own, [M, H, D]."""
        ...

    def decoder(self, stack: DecoderStack) -> Decoder:
        """The stack, bound to these operations; what it computes is `kernels.decoder.run_layers`."""
        ...


# To be raised whenever a profile's results change in any bit, on either kind of kernels: by its products, by
# what is around them, or by which matrices it takes in whole numbers. Hand-offs and cached blocks of another
# version are refused.
NUMERICS: dict[Profile, int] = {"exact": 3, "fast": 3}


def numerics_name(operations: Operations) -> str:
    """What decides a result to the bit on one kind of processor: kernels, profile, version."""
    return f"{operations.name} {operations.profile} {NUMERICS[operations.profile]}"


def _check_threads(threads: object) -> None:
    """OpenMP ends the process for a number that it cannot have."""
    if type(threads) is int and 1 <= threads <= MAX_THREADS:
        return
    from protocol.errors import InvalidInput

    raise InvalidInput(f"threads is {threads!r}, expected a whole number from 1 to {MAX_THREADS}")


@lru_cache
def _say_that_it_is_slow(profile: Profile) -> None:
    """Once a process. `fast` on PyTorch is for comparison: it is slower than `exact`."""
    logging.getLogger(__name__).warning(
        "the CPU kernels are not built: PyTorch runs the model in the profile %s, many times slower; "
        "run: make setup",
        profile,
    )


def select_operations(
    threads: int, kind: Literal["auto", "c", "torch"] = "auto", profile: Profile = "exact"
) -> Operations:
    """The C library where it has been built, else PyTorch, with a warning in the log.

    `c` insists and raises MissingCapability. Raises InvalidInput: `threads` is none of 1 to 1024.
    """
    from kernels.cpu import library

    _check_threads(threads)
    if kind != "torch" and library.available():
        from kernels.cpu.operations import CpuOperations

        return CpuOperations(threads, profile)
    if kind == "c":
        from protocol.errors import MissingCapability

        raise MissingCapability("the CPU kernels are not built", hint="run: make setup")
    from kernels.torch_operations import TorchOperations

    if kind == "auto":
        _say_that_it_is_slow(profile)
    torch.set_num_threads(threads)
    return TorchOperations(profile)
