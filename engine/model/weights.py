"""The tensors of a file, taken by a model one by one: what is left over at the end is an error."""

import mmap
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.errors import BrokenModelFile
from engine.gguf_file import GgufFile, GgufTensor
from kernels.operations import Weight, WeightFormat

MATRIX_FORMATS: dict[str, WeightFormat] = {"F32": "f32", "Q4_1": "q4_1", "Q8_0": "q8_0"}
VECTOR_FORMATS = ("F32", "F16")


class WeightReader:
    """Checks shape and format of each tensor: the kernels read raw memory and trust both."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._taken: set[str] = set()

    def matrix(self, name: str, rows: int, columns: int) -> Weight:
        """A weight as its file stores it. Raises BrokenModelFile."""
        tensor = self._take(name, (rows, columns), tuple(MATRIX_FORMATS))
        return Weight(_shared(tensor), rows, columns, MATRIX_FORMATS[tensor.format])

    def vector(self, name: str, size: int) -> Tensor:
        """float32 [size]. Raises BrokenModelFile."""
        return _shared(self._take(name, (size,), VECTOR_FORMATS)).float()

    def release(self) -> None:
        """Give back the pages that were read to copy from; those that are used come in again when touched."""
        memory: Any = next(iter(self._file.tensors.values())).data
        while isinstance(memory, np.ndarray):
            memory = memory.base
        if isinstance(memory, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            memory.madvise(mmap.MADV_DONTNEED)

    def check_all_taken(self) -> None:
        """A tensor that the model does not use (a bias, say) would leave it running, and silently wrong."""
        if unknown := sorted(self._file.tensors.keys() - self._taken):
            raise BrokenModelFile(
                f"{self._file.path}: {len(unknown)} tensors have no use in this family: {unknown[0]!r}, …",
                hint="the file is of a variant that is not supported",
            )

    def _take(self, name: str, shape: tuple[int, ...], formats: tuple[str, ...]) -> GgufTensor:
        tensor = self._file.tensor(name, shape)
        if tensor.format not in formats:
            raise BrokenModelFile(
                f"{self._file.path}: tensor {name!r} is {tensor.format}; supported: {', '.join(formats)}"
            )
        self._taken.add(name)
        return tensor


def _shared(tensor: GgufTensor) -> Tensor:
    """The mapped pages as a tensor, without a copy. Copy-on-write, since torch knows no read-only tensors."""
    return torch.from_numpy(tensor.data)  # pyright: ignore[reportUnknownMemberType]
