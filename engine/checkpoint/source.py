"""The weights of a folder, handed to a model one by one.

One file is open at a time and memory-mapped, so a model that copies what it takes needs memory for itself
and for the pages of one file, which the system drops when it needs them.

Shapes: M rows asked for, E channels of a table's row.
"""

import ctypes
import mmap
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.checkpoint.contents import Location, locate
from engine.checkpoint.entries import GROUP
from engine.checkpoint.family import Family
from engine.checkpoint.folder import CheckpointFolder, read_config
from engine.checkpoint.formats import StoredWeight, dequantise
from engine.checkpoint.opening import NO_DRAFTS, open_model
from engine.checkpoint.parts import WHOLE, Part
from engine.errors import BrokenModelFile
from engine.model.tensor_source import RowsInMemory, RowTable, check_nothing_left, check_shape

_HELD_BACK_BYTES = 32 << 20  # of weights on their way, at most, that the allocator keeps when they are freed
_TABLE_IN_MEMORY_BYTES = 256 << 20  # a smaller table costs less in memory than a thread that reads it


def open_checkpoint(path: Path, part: Part = WHOLE) -> "CheckpointSource":
    """The weights of a folder, checked against what its config implies: names, shapes and types.

    Shards of which a part needs nothing may be missing. Reads headers alone. Raises BrokenModelFile.
    """
    folder, family = open_model(path, partial=part != WHOLE)
    if folder.config != read_config(path):
        warnings.warn(f"{path}: {NO_DRAFTS}", stacklevel=2)  # once, as warnings are shown
    return CheckpointSource(folder, family, locate(folder, family, lambda n: part.holds(n, family.cut)))


class _Slice(Protocol):
    def __getitem__(self, index: tuple[int, slice]) -> Tensor: ...


class _File(Protocol):
    """What is used of safetensors' file, which has no types."""

    def get_tensor(self, name: str) -> Tensor: ...
    def get_slice(self, name: str) -> _Slice: ...


class CheckpointSource:
    """A TensorSource and a RowSource over a folder. Not thread-safe, but for the tables that it hands out."""

    def __init__(self, folder: CheckpointFolder, family: Family, locations: Mapping[str, Location]) -> None:
        self.folder = folder
        self.family = family
        self._locations = locations
        self._taken: set[str] = set()
        self._shard: Path | None = None
        self._file: _File | None = None
        self._on_their_way = 0  # bytes of weights taken since what was freed went back

    def __contains__(self, name: object) -> bool:
        return name in self._locations

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """float32 in memory of its own. Raises BrokenModelFile, for a value that is no finite number too."""
        values = self._finite(name, dequantise(self._take_stored(name, shape)))
        self._on_their_way += values.nbytes
        if self._on_their_way > _HELD_BACK_BYTES:
            _give_back_freed()
            self._on_their_way = 0
        return values

    def take_rows(self, name: str, shape: tuple[int, ...]) -> RowTable:
        """A table that stays in its file, memory-mapped and quantised, unless it is small.

        Values of one in its file are not looked at: that would read all of it.
        """
        weight = self._take_stored(name, shape)
        rows, columns = shape
        if rows * columns * 4 <= _TABLE_IN_MEMORY_BYTES:
            return RowsInMemory(self._finite(name, dequantise(weight)))
        for part in (weight.values, weight.scales):
            if part is not None:
                _read_here_and_there(part)
        return MappedRows(weight)

    def take_stored(self, name: str) -> StoredWeight:
        """A weight as its file has it: mapped pages, not dequantised. Counts as taken.

        Raises BrokenModelFile.
        """
        location = self._located(name)
        scales = None if location.scales is None else self._read(location.scales)
        self._taken.add(name)
        return StoredWeight(location.dtype, self._values(location), scales, location.block)

    def check_all_taken(self) -> None:
        _give_back_freed()
        check_nothing_left(str(self.folder.path), set(self._locations.keys() - self._taken))

    def _finite(self, name: str, values: Tensor) -> Tensor:
        if values.numel() and not torch.stack(torch.aminmax(values)).isfinite().all():
            raise BrokenModelFile(
                f"{self.folder.path}: tensor {name!r} has a value that is infinite or not a number",
                hint="download the folder again; every answer would be made of it",
            )
        return values

    def _take_stored(self, name: str, shape: tuple[int, ...]) -> StoredWeight:
        check_shape(str(self.folder.path), name, self._located(name).entry.shape, shape)
        return self.take_stored(name)

    def _located(self, name: str) -> Location:
        if name not in self._locations:
            raise BrokenModelFile(
                f"{self.folder.path}: no tensor {name!r}",
                hint="its config implies none, or it is not of this worker's part",
            )
        return self._locations[name]

    def _values(self, location: Location) -> Tensor:
        place = location.place
        if place.expert is None:
            return self._read(place.stored)
        rows = location.entry.shape[0]
        start = (place.half or 0) * rows
        return self._file_of(place.stored).get_slice(place.stored)[place.expert, start : start + rows]

    def _read(self, stored: str) -> Tensor:
        try:
            return self._file_of(stored).get_tensor(stored)
        except SafetensorError as error:
            raise BrokenModelFile(f"{self.folder.shards[stored]}: tensor {stored!r}: {error}") from error

    def _file_of(self, stored: str) -> _File:
        shard = self.folder.shards[stored]
        if self._file is None or shard != self._shard:
            self._file = None  # unmaps the file before the next one is mapped
            self._file, self._shard = cast(_File, safe_open(shard, framework="pt")), shard
        return self._file


@dataclass(frozen=True, slots=True)
class MappedRows:
    """A table in its file. Reading a row that is in no page yet waits for the disk."""

    weight: StoredWeight

    def rows(self, ids: Tensor) -> Tensor:
        """float32 [M, E] of int64 ids [M]."""
        weight = self.weight
        scales = None if weight.scales is None else _picked(weight.scales, ids)
        return dequantise(StoredWeight(weight.dtype, _picked(weight.values, ids), scales, (1, GROUP)))


def _read_here_and_there(mapped: Tensor) -> None:
    """Tell the system that a tensor's pages are asked for one by one.

    It would otherwise read the neighbours of each missing page too: megabytes for a row of hundreds of bytes.
    Advice only: where the system takes none, rows are the same.
    """
    if not hasattr(mmap, "MADV_RANDOM"):
        return
    start = mapped.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = mapped.data_ptr() + mapped.nbytes - start
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_RANDOM)


def _give_back_freed() -> None:
    """Return to the system what has been freed between weights that stay.

    A weight on its way takes two to eight times what stays of it, and glibc keeps holes below 32 MiB: without
    this they come to half of the model. Where the C library is another, nothing happens.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _picked(table: Tensor, ids: Tensor) -> Tensor:
    """Rows of a table; torch indexes bytes, and not each of the types of one byte."""
    return table.view(torch.uint8)[ids].view(table.dtype) if table.itemsize == 1 else table[ids]
