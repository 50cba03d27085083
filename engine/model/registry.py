"""Model files and folders to families."""

from pathlib import Path
from typing import Literal

from engine.checkpoint.checksums import check_sums
from engine.checkpoint.parts import WHOLE, Part
from engine.checkpoint.source import CheckpointSource, open_checkpoint
from engine.errors import BrokenModelFile, UnknownModel
from engine.gguf_file import open_gguf
from engine.model.base import Model
from engine.model.deepseek.config import DeepseekConfig, Quantisation
from engine.model.deepseek.dspark import DraftModel
from engine.model.deepseek.engram_hash import compress_ids
from engine.model.deepseek.model import DeepseekModel
from engine.model.deepseek.moe import Exchange
from engine.model.deepseek.serving import DeepseekServed
from engine.model.deepseek.text_model import TextModel
from engine.model.deepseek.vision import VisionTower
from engine.model.deepseek_v4.config import DeepseekV4Config, V4Quantisation
from engine.model.deepseek_v4.model import DeepseekV4Model
from engine.model.llama import LlamaModel
from engine.model_path import model_path
from kernels.operations import Operations, Profile, select_operations
from protocol.errors import InvalidInput

DType = Literal["float32"]
Caches = Literal["auto", "released", "float32"]


def load_model(
    name_or_path: str,
    *,
    dtype: DType = "float32",
    threads: int = 2,
    operations: Literal["auto", "c", "torch"] = "auto",
    profile: Profile = "exact",
    replay: bool = True,
    caches: Caches = "auto",
    part: Part = WHOLE,
    exchange: Exchange | None = None,
) -> Model:
    """Load a model by built-in name, GGUF file, or folder with config.json and safetensors.

    Arithmetic is in `dtype`. In the profile `exact` a GGUF file's weights stay memory-mapped as the file has
    them, and a folder's are dequantised. `fast` rounds activations to 16 bits and multiplies in integers: a
    GGUF file's matrices, and a folder's projections and experts (`kernels/whole_numbers.py`), packed in
    memory of their own. `replay` and `caches`: see `EngineConfig`. `part` and `exchange`: a worker's share of
    a folder (`DeepseekModel`, `DeepseekV4Model`), whose other shards may be missing.

    Blocks for as long as reading takes. Raises UnknownModel, BrokenModelFile, MissingCapability;
    InvalidInput: a part that the model cannot run as.
    """
    if dtype != "float32":
        raise UnknownModel(f"dtype {dtype!r}: models compute in 'float32'")
    path = model_path(name_or_path)
    if path.is_dir():
        folder_operations = select_operations(threads, operations, profile)
        return _from_folder(
            path, folder_operations, replay=replay, caches=caches, part=part, exchange=exchange
        )
    _check_whole(path, part)
    file = open_gguf(path)
    architecture = file.require("general.architecture")
    if architecture != "llama":
        raise BrokenModelFile(
            f"{file.path}: architecture {architecture!r} is not supported", hint="supported: llama"
        )
    return LlamaModel(file, select_operations(threads, operations, profile))


def load_draft_model(model: Model) -> DraftModel:
    """The draft blocks of a V4.1 model's own folder, in the model's profile; `dspark.py` says how they run.

    They use the model's embedding and head, and end with it. Blocks for as long as reading takes.
    Raises UnknownModel: a model without such blocks; BrokenModelFile.
    """
    served, text = _v41_of(model, "draft blocks")
    return DraftModel(text, open_checkpoint(served.path, text.part))


def load_vision_tower(model: Model) -> VisionTower:
    """The vision tower of a V4.1 model's own folder. Blocks for as long as reading takes.

    Raises UnknownModel: a model of another family; BrokenModelFile: one that cannot see.
    """
    served, text = _v41_of(model, "a vision tower")
    return VisionTower(text.config, open_checkpoint(served.path, text.part), text.operations)


def _family(model: Model) -> str:
    return type(model.text if isinstance(model, DeepseekServed) else model).__name__


def _v41_of(model: Model, wanted: str) -> tuple[DeepseekServed, DeepseekModel]:
    if isinstance(model, DeepseekServed) and isinstance(model.text, DeepseekModel):
        return model, model.text
    raise UnknownModel(
        f"{wanted}: {_family(model)} has none that this engine runs",
        hint="load a folder whose model_type is 'deepseek_v41'",
    )


def _check_whole(path: Path, part: Part) -> None:
    if part != WHOLE:
        raise InvalidInput(f"part: {path} runs whole", hint="folders run in parts")


def _from_folder(
    path: Path, operations: Operations, *, replay: bool, caches: Caches, part: Part, exchange: Exchange | None
) -> Model:
    """The reader checks the folder against what its config implies, drafts and vision included."""
    source = open_checkpoint(path, part)
    check_sums(path)
    if source.family.model_type == "deepseek_v41":
        text: TextModel = _v41(source, operations, caches, part, exchange)
    else:
        text = _v4(source, operations, caches, part, exchange)
    return DeepseekServed(text, source.folder, replay=replay)


def _v4(
    source: CheckpointSource, operations: Operations, caches: Caches, part: Part, exchange: Exchange | None
) -> DeepseekV4Model:
    """A folder as transformers writes it, without the release's formats, has no such caches either."""
    plain = caches == "float32" or (caches == "auto" and "quantization_config" not in source.folder.config)
    quantisation = V4Quantisation.off() if plain else V4Quantisation()
    config = DeepseekV4Config.from_dict(source.folder.config, quantisation)
    return DeepseekV4Model(config, source, operations, part=part, exchange=exchange)


def _v41(
    source: CheckpointSource, operations: Operations, caches: Caches, part: Part, exchange: Exchange | None
) -> DeepseekModel:
    """Rounded caches are part of what the model computes: widths that have none are refused, or asked for."""
    quantisation = Quantisation.off() if caches == "float32" else Quantisation()
    config = DeepseekConfig.from_dict(source.folder.config, quantisation)
    compressed, path = None, source.folder.path
    if config.engram_layer_ids:
        from tokenizers import Tokenizer

        if not (path / "tokenizer.json").exists():
            raise BrokenModelFile(f"{path}: no tokenizer.json, whose tokens Engram hashes")
        try:
            tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # the library raises no other
            raise BrokenModelFile(f"{path / 'tokenizer.json'}: no tokenizer ({error})") from error
        compressed = compress_ids(tokenizer)
    return DeepseekModel(config, source, operations, compressed, part=part, exchange=exchange)
