"""Model files and folders to families."""

from pathlib import Path
from typing import Literal

from engine.checkpoint.source import CheckpointSource, open_checkpoint
from engine.errors import BrokenModelFile, UnknownModel
from engine.gguf_file import open_gguf
from engine.model.base import Model
from engine.model.deepseek.config import DeepseekConfig
from engine.model.deepseek.engram_hash import compress_ids
from engine.model.deepseek.model import DeepseekModel
from engine.model.deepseek.serving import DeepseekServed
from engine.model.deepseek.text_model import TextModel
from engine.model.deepseek_v4.config import DeepseekV4Config
from engine.model.deepseek_v4.model import DeepseekV4Model
from engine.model.llama import LlamaModel
from engine.model_path import model_path
from kernels.operations import Operations, Profile, select_operations

DType = Literal["float32"]


def load_model(
    name_or_path: str,
    *,
    dtype: DType = "float32",
    threads: int = 2,
    operations: Literal["auto", "c", "torch"] = "auto",
    profile: Profile = "exact",
    replay: bool = True,
) -> Model:
    """Load a model by built-in name, GGUF file, or folder with config.json and safetensors.

    Arithmetic is in `dtype`. A GGUF file's weights stay memory-mapped as the file has them; the profile
    `fast` rounds activations to 8 bits, multiplies in integers, and packs a copy of the weights for it.
    Weights of a folder are dequantised. `replay`: see `EngineConfig`. Blocks for as long as reading takes.
    Raises UnknownModel, BrokenModelFile, MissingCapability.
    """
    if dtype != "float32":
        raise UnknownModel(f"dtype {dtype!r}: models compute in 'float32'")
    path = model_path(name_or_path)
    if path.is_dir():
        if profile != "exact":
            raise UnknownModel(f"profile {profile!r}: models from folders run in 'exact'")
        return _from_folder(path, select_operations(threads, operations), replay)
    file = open_gguf(path)
    architecture = file.require("general.architecture")
    if architecture != "llama":
        raise BrokenModelFile(
            f"{file.path}: architecture {architecture!r} is not supported", hint="supported: llama"
        )
    return LlamaModel(file, select_operations(threads, operations, profile))


def _from_folder(path: Path, operations: Operations, replay: bool) -> Model:
    """The reader has checked the folder against what its config implies, drafts and vision included."""
    source = open_checkpoint(path)
    if source.family.model_type == "deepseek_v41":
        text: TextModel = _v41(source, path, operations)
    else:
        config = DeepseekV4Config.from_dict(source.folder.config)
        text = DeepseekV4Model(config, source, operations)
    return DeepseekServed(text, source.folder, replay=replay)


def _v41(source: CheckpointSource, path: Path, operations: Operations) -> DeepseekModel:
    config = source.family.config
    assert isinstance(config, DeepseekConfig)
    compressed = None
    if config.engram_layer_ids:
        from tokenizers import Tokenizer

        if not (path / "tokenizer.json").exists():
            raise BrokenModelFile(f"{path}: no tokenizer.json, whose tokens Engram hashes")
        compressed = compress_ids(Tokenizer.from_file(str(path / "tokenizer.json")))
    return DeepseekModel(config, source, operations, compressed)
