"""A GGUF file, opened and checked: metadata and tensors, memory-mapped.

Two processes that open the same file share its pages. Format: GGUF specification, version 3.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
from numpy.typing import NDArray

from engine.errors import BrokenModelFile

MAGIC = b"GGUF"
# What the reader raises on a file that lies; RecursionError on arrays of arrays of arrays.
_FAULTS = (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError, RecursionError)


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """`shape` is [rows, columns] or [columns]; `data` float32 of that shape, or uint8 [rows, row_bytes]."""

    name: str
    shape: tuple[int, ...]
    format: str  # F32, Q4_1, Q8_0, … as GGML names them
    data: NDArray[Any]
    first: int  # byte of the file, at which `data` begins


@dataclass(frozen=True, slots=True)
class GgufFile:
    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def require(self, key: str) -> Any:
        """A metadata value; BrokenModelFile names the key that is missing."""
        if key not in self.metadata:
            raise BrokenModelFile(f"{self.path}: metadata has no {key!r}")
        return self.metadata[key]

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = 1 << 20) -> int:
        """A whole number within bounds that no real model leaves; BrokenModelFile names key and value."""
        value = self.require(key) if default is None else self.metadata.get(key, default)
        if type(value) is not int or not least <= value <= most:
            raise self._unfit(key, value, f"a whole number from {least} to {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive, finite number."""
        value = self.require(key) if default is None else self.metadata.get(key, default)
        if not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise self._unfit(key, value, "a positive number")
        return float(value)

    def strings(self, key: str) -> list[str]:
        """A list of strings, not empty."""
        value: object = self.require(key)
        if not isinstance(value, list) or not value or type(cast(list[object], value)[0]) is not str:
            raise self._unfit(key, cast(object, value), "a list of strings")
        return cast(list[str], value)

    def _unfit(self, key: str, value: object, expected: str) -> BrokenModelFile:
        return BrokenModelFile(f"{self.path}: metadata {key!r} is {value!r:.60}, expected {expected}")

    def tensor(self, name: str, shape: tuple[int, ...]) -> GgufTensor:
        """A tensor of that shape; a missing or misshapen one is an error that says what was expected."""
        found = self.tensors.get(name)
        if found is None:
            raise BrokenModelFile(f"{self.path}: tensor {name!r} is missing, expected shape {list(shape)}")
        if found.shape != shape:
            raise BrokenModelFile(
                f"{self.path}: tensor {name!r} has shape {list(found.shape)}, expected {list(shape)}"
            )
        return found


class _Reader(gguf.GGUFReader):
    """Keeps the mapping as a plain array: slicing `np.memmap` 250,000 times costs seconds at every start."""

    @property
    def data(self) -> NDArray[Any]:
        return self._plain

    @data.setter
    def data(self, mapping: NDArray[Any]) -> None:
        self._plain = np.asarray(mapping)


def open_gguf(path: Path) -> GgufFile:
    """Map the file, copy-on-write. Reads headers only; the tensors' pages come in when they are touched."""
    _check_start(path)
    try:
        reader = _Reader(str(path), "c")
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except _FAULTS as error:
        raise BrokenModelFile(f"{path}: not a whole GGUF file ({error})", hint="download it again") from error
    tensors = {t.name: _tensor(cast(Any, t)) for t in reader.tensors}
    return GgufFile(path, metadata, tensors)


def _tensor(tensor: Any) -> GgufTensor:
    shape = tuple(int(size) for size in reversed(tensor.shape))
    data, first = np.asarray(tensor.data), int(tensor.data_offset)
    return GgufTensor(tensor.name, shape, tensor.tensor_type.name, data, first)


def _check_start(path: Path) -> None:
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise BrokenModelFile(f"{path}: {error.strerror or error}") from error
    if start != MAGIC:
        raise BrokenModelFile(f"{path}: does not start with {MAGIC!r}, so it is not a GGUF file")
