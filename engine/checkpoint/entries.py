"""One weight of a model, and the tensors in which a file stores it. Imports no torch.

Source: fact sheet, section 11.2. A weight in blocks is two tensors, `X.weight` and `X.scale`; the stored
type of the first one says which format it is.
"""

from dataclasses import dataclass
from math import prod
from typing import Literal

Kind = Literal["dense", "expert", "table", "plain", "exact", "ids"]
Section = Literal["backbone", "engram", "draft", "vision"]
Format = Literal["fp4", "fp8", "bf16", "f32"]
Shape = tuple[int, ...]

FLOATS = ("F32", "BF16", "F16")
GROUP = 32  # values that share a scale in FP4 weights and in Engram tables

# Formats that each kind may be stored in; dtype names are those of safetensors.
_STORED: dict[Kind, tuple[str, ...]] = {
    "dense": (*FLOATS, "F8_E4M3"),
    "expert": (*FLOATS, "F8_E4M3", "I8"),
    "table": (*FLOATS, "F8_E4M3"),
    "plain": FLOATS,
    "exact": FLOATS,
    "ids": ("I64", "I32"),
}
_DTYPES: dict[Format, str] = {"fp4": "I8", "fp8": "F8_E4M3", "bf16": "BF16", "f32": "F32"}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file: `dtype` as safetensors names it."""

    name: str
    shape: Shape
    dtype: str


@dataclass(frozen=True, slots=True)
class Formats:
    """In what a checkpoint stores each kind of weight. `block`: rows and columns of a scale of FP8."""

    dense: Format
    experts: Format
    plain: Format
    block: tuple[int, int]

    def of(self, kind: Kind) -> Format:
        match kind:
            case "expert":
                return self.experts
            case "dense" | "table":
                return self.dense
            case "plain":
                return self.plain
            case "exact" | "ids":
                return "f32"


@dataclass(frozen=True, slots=True)
class Entry:
    """A weight by its released name. `shape` is that of its values.

    `dense` and `expert` matrices, `table`s with a scale for each row and 32 channels, `plain` tensors in
    the model's type, `exact` ones always in float32, `ids` in integers.
    """

    name: str
    shape: Shape
    kind: Kind
    section: Section

    @property
    def num_values(self) -> int:
        return prod(self.shape)

    @property
    def scale_name(self) -> str:
        return self.name.removesuffix("weight") + "scale"

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The types that the tensor of this name may have."""
        return _STORED[self.kind]

    def stored(self, formats: Formats) -> tuple[StoredTensor, ...]:
        """The tensors of the file, in a checkpoint of these formats."""
        dtype = "I64" if self.kind == "ids" else _DTYPES[formats.of(self.kind)]
        return self.stored_as(dtype, formats.block)

    def stored_as(self, dtype: str, block: tuple[int, int]) -> tuple[StoredTensor, ...]:
        """The tensors of the file where the first one has this type. An FP4 row must fill its groups."""
        if dtype not in ("F8_E4M3", "I8"):
            return (StoredTensor(self.name, self.shape, dtype),)
        rows, columns = self.shape
        high, wide = self.scale_block(dtype, block)
        scale = StoredTensor(self.scale_name, (-(-rows // high), -(-columns // wide)), "F8_E8M0")
        stored_columns = columns // 2 if dtype == "I8" else columns
        return StoredTensor(self.name, (rows, stored_columns), dtype), scale

    def scale_block(self, dtype: str, block: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        return block if dtype == "F8_E4M3" and self.kind != "table" else (1, GROUP)
