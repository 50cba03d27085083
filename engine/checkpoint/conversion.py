"""A folder of weights in other formats: from float32 or bfloat16 to the release's, and back.

Weights that have their format already are copied bit for bit; the others are dequantised and rounded once.
To leave FP4 or FP8 and come back gives the same values: each is the nearest to itself.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.checkpoint.contents import Location, in_shard_order, locate
from engine.checkpoint.entries import GROUP, Entry, Format, Formats
from engine.checkpoint.family import Family, with_formats
from engine.checkpoint.folder_writer import FolderWriter
from engine.checkpoint.formats import StoredWeight, as_e8m0, dequantise, quantise, raw_bytes
from engine.checkpoint.opening import open_model
from engine.checkpoint.source import CheckpointSource
from protocol.errors import InvalidInput

_ROWS_AT_ONCE = 1 << 20  # of a table: 1 GiB of float32 at 256 channels


@dataclass(frozen=True, slots=True)
class Progress:
    """Weights done and in all; `name` is the last one."""

    num_done: int
    num_weights: int
    name: str


@dataclass(frozen=True, slots=True)
class Converted:
    """What a folder became. Bytes are those of its tensors."""

    num_tensors: int
    num_bytes: int
    formats: Formats


def convert(
    source: Path,
    target: Path,
    *,
    dense: Format = "fp8",
    experts: Format = "fp4",
    shard_bytes: int = 4 << 30,
    report: Callable[[Progress], None] = lambda _: None,
) -> Converted:
    """Write `target`, which must not exist, under released names and sharded. Blocks.

    Needs memory for two or three shards (one that fills, and its bytes as they are written) and one weight.
    Norms and other plain tensors are in bfloat16, or in float32 where the dense weights are. Raises
    BrokenModelFile for the source, InvalidInput for what cannot be converted, and ResourceShortage for the
    disk; then no target is there.
    """
    writer = FolderWriter(target, shard_bytes)  # refuses a target before anything is read
    folder, family = open_model(source)
    formats = Formats(dense, experts, "f32" if dense == "f32" else "bf16", family.released_block)
    _check(family, formats)
    locations = locate(folder, family, lambda _: True)
    reader = CheckpointSource(folder, family, locations)
    num_tensors = num_bytes = 0
    with writer:
        for done, location in enumerate(in_shard_order(folder, locations), start=1):
            for name, tensor in _converted(reader.take_stored(location.entry.name), location, formats):
                writer.add(name, tensor)
                num_tensors, num_bytes = num_tensors + 1, num_bytes + tensor.nbytes
            report(Progress(done, len(locations), location.entry.name))
        writer.copy_companions(source)
        writer.finish(with_formats(folder.config, formats))
    return Converted(num_tensors, num_bytes, formats)


def _check(family: Family, formats: Formats) -> None:
    """Before the first byte is written."""
    for entry in family.entries:
        if formats.of(entry.kind) == "fp4" and entry.shape[1] % GROUP:
            raise InvalidInput(
                f"experts fp4: rows of {entry.name!r} have {entry.shape[1]} values, "
                f"expected a multiple of {GROUP}",
                hint="choose fp8 or bf16 for the experts of this model",
            )


def _converted(weight: StoredWeight, location: Location, formats: Formats) -> Iterator[tuple[str, Tensor]]:
    """The tensors to store, by name."""
    entry = location.entry
    names = [stored.name for stored in entry.stored(formats)]
    dtype = entry.stored(formats)[0].dtype
    if entry.kind == "ids":
        yield names[0], weight.values.to(torch.int64)
        return
    block = entry.scale_block(dtype, formats.block)
    same = _is_in(weight, dtype, block)
    tensors = _as_stored(weight, entry) if same else _rounded(weight, entry, dtype, block)
    yield from zip(names, tensors, strict=True)


def _is_in(weight: StoredWeight, dtype: str, block: tuple[int, int]) -> bool:
    """A float with scales, as tests have, or float32 scales, as base models have, are other formats."""
    if weight.scales is None:
        return weight.dtype == dtype
    return weight.dtype == dtype and weight.block == block and weight.scales.itemsize == 1


def _as_stored(weight: StoredWeight, entry: Entry) -> tuple[Tensor, ...]:
    """Bit for bit. A copy lets go of the file that it comes from, but a table may be larger than memory."""
    values = weight.values if entry.kind == "table" else weight.values.clone()
    return (values,) if weight.scales is None else (values, as_e8m0(raw_bytes(weight.scales)).clone())


def _rounded(weight: StoredWeight, entry: Entry, dtype: str, block: tuple[int, int]) -> tuple[Tensor, ...]:
    try:
        if entry.kind != "table":
            return quantise(dequantise(weight), dtype, block)
        starts = range(0, entry.shape[0], _ROWS_AT_ONCE)
        parts = [quantise(dequantise(_rows(weight, start)), dtype, block) for start in starts]
    except InvalidInput as error:
        raise InvalidInput(f"tensor {entry.name!r}: {error.message}") from error
    return tuple(_joined(column) for column in zip(*parts, strict=True))


def _rows(weight: StoredWeight, start: int) -> StoredWeight:
    """A stretch of a table, whose rows have scales of their own."""
    rows = slice(start, start + _ROWS_AT_ONCE)
    scales = None if weight.scales is None else weight.scales[rows]
    return StoredWeight(weight.dtype, weight.values[rows], scales, weight.block)


def _joined(parts: tuple[Tensor, ...]) -> Tensor:
    if parts[0].itemsize > 1:
        return torch.cat(parts)
    return torch.cat([raw_bytes(part) for part in parts]).view(parts[0].dtype)
