"""Where a model takes its tensors from, one by one, by the released checkpoint's names.

A model asks for each tensor that it needs with the shape that its configuration implies; what is missing,
misshapen or left over at the end is an error that names the tensor.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from engine.errors import BrokenModelFile


class TensorSource(Protocol):
    """Not thread-safe. Each tensor can be taken once or more; `check_all_taken` ends the taking."""

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """float32, contiguous, dequantised where it is stored in blocks. `shape` is that of the values.

        Raises BrokenModelFile: missing, or of another shape, with both.
        """
        ...

    def __contains__(self, name: object) -> bool: ...

    def check_all_taken(self) -> None:
        """Raises BrokenModelFile where tensors are left that nobody asked for."""
        ...


class RowTable(Protocol):
    """A table too large to be dequantised whole, read row by row. May be read by another thread."""

    def rows(self, ids: Tensor) -> Tensor:
        """float32 [M, columns] of int64 ids [M]. Blocks for the time that the rows' pages take."""
        ...


@runtime_checkable
class RowSource(Protocol):
    """A source that can leave a table where it is: on disk, say. A model asks it for Engram tables."""

    def take_rows(self, name: str, shape: tuple[int, ...]) -> RowTable:
        """Counts as taken. Raises BrokenModelFile, as `take` does."""
        ...


@dataclass(frozen=True, slots=True)
class RowsInMemory:
    """A float32 table."""

    table: Tensor

    def rows(self, ids: Tensor) -> Tensor:
        return self.table[ids]


class TensorsInMemory:
    """Tensors that exist already: of tests, and of a training."""

    def __init__(self, tensors: Mapping[str, Tensor], origin: str) -> None:
        self._tensors = tensors
        self._origin = origin  # of the tensors, for errors
        self._taken: set[str] = set()

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._tensors:
            raise BrokenModelFile(f"{self._origin}: no tensor {name!r}, expected with shape {list(shape)}")
        tensor = self._tensors[name]
        check_shape(self._origin, name, tuple(tensor.shape), shape)
        self._taken.add(name)
        return tensor.float().contiguous()

    def check_all_taken(self) -> None:
        check_nothing_left(self._origin, self._tensors.keys() - self._taken)


def check_shape(origin: str, name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Raises BrokenModelFile that says both."""
    if found != expected:
        raise BrokenModelFile(
            f"{origin}: tensor {name!r} has shape {list(found)}, expected {list(expected)}",
            hint="the file and its config do not belong together",
        )


def check_nothing_left(origin: str, names: set[str]) -> None:
    """Raises BrokenModelFile: a tensor without a use would leave the model running, and silently wrong."""
    if names:
        raise BrokenModelFile(
            f"{origin}: {len(names)} tensors have no use in this model: {min(names)!r}, …",
            hint="the file is of a variant that is not supported",
        )
