"""Model files to families."""

from typing import Literal

from engine.errors import BrokenModelFile, UnknownModel
from engine.gguf_file import GgufFile, open_gguf
from engine.model.llama import LlamaModel
from engine.model_path import model_path
from kernels.operations import Profile, select_operations

DType = Literal["float32"]


def load_model(
    name_or_path: str,
    *,
    dtype: DType = "float32",
    threads: int = 2,
    operations: Literal["auto", "c", "torch"] = "auto",
    profile: Profile = "exact",
) -> LlamaModel:
    """Load a model by built-in name or path.

    Arithmetic is in `dtype`, on weights that stay memory-mapped as the file has them; the profile `fast`
    rounds activations to 8 bits, multiplies in integers, and packs a copy of the weights for it. Blocks for
    under a second.
    Raises UnknownModel, BrokenModelFile, MissingCapability.
    """
    if dtype != "float32":
        raise UnknownModel(f"dtype {dtype!r}: llama models compute in 'float32'")
    file = open_gguf(model_path(name_or_path))
    return _family(file)(file, select_operations(threads, operations, profile))


def _family(file: GgufFile) -> type[LlamaModel]:
    architecture = file.require("general.architecture")
    if architecture != "llama":
        raise BrokenModelFile(
            f"{file.path}: architecture {architecture!r} is not supported", hint="supported: llama"
        )
    return LlamaModel
