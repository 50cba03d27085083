"""What can be said of a model without its weights: sizes, caches, roles of its layers. Imports no torch.

Source: fact sheet, sections 1 to 3 and 11.2; figures of the releases are in its text and in the tests.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from math import prod
from pathlib import Path
from typing import Any

from engine.cache.layout import CacheLayout, fills_groups, llama_bytes_per_token, v4_layout, v41_layout
from engine.checkpoint.contents import locate
from engine.checkpoint.entries import Entry
from engine.checkpoint.family import Family, read_family
from engine.checkpoint.folder import CONFIG, INDEX, read_config
from engine.checkpoint.opening import NO_DRAFTS, open_model
from engine.checkpoint.parts import WHOLE, Part
from engine.errors import UnknownModel
from engine.gguf_file import open_gguf
from engine.model.deepseek.config import DeepseekConfig
from engine.model.deepseek.roles import layer_roles
from engine.model_path import BUILT_IN, model_path

CONFIGS = ("deepseek-v4.1-flash", "deepseek-v4-flash")


@dataclass(frozen=True, slots=True)
class Parameters:
    """Values, not bytes. `other`: what is neither in matrices of attention and experts nor in the vocabulary.

    That is: norms, gates, hyper-connections, compressors, index keys, and the projections of Engram.
    """

    backbone: int  # matrices of attention and experts, embedding, head
    engram: int  # its tables
    draft: int
    vision: int
    other: int


@dataclass(frozen=True, slots=True)
class Active:
    """Values that one token's pass multiplies. `prefill`: by a worker that holds the encoder alone."""

    prefill: int
    decode: int


@dataclass(frozen=True, slots=True)
class LayerInfo:
    """The sources are the layers whose entries and whose selection it uses; -1 where it uses none."""

    layer: int
    role: str
    ratio: int
    kv_source: int
    index_source: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """`num_files` is 0 where no weights are there; what is there has been checked."""

    family: str
    num_tensors: int
    parameters: Parameters
    active: Active
    caches: CacheLayout
    max_positions: int
    layers: tuple[LayerInfo, ...]
    num_files: int
    notes: tuple[str, ...] = ()  # what loading makes of it that its config does not say


def describe(name_or_path: str) -> ModelInfo:
    """A built-in name, a folder with a config.json, or a GGUF file. Weights are not needed.

    Raises UnknownModel, and BrokenModelFile for a file that is wrong.
    """
    if name_or_path in CONFIGS:
        raw = _built_in_config(name_or_path)
        return _describe_family(read_family(raw), raw, num_files=0)
    path = model_path(name_or_path) if name_or_path in BUILT_IN else Path(name_or_path)
    if (path / CONFIG).is_file():
        return _describe_folder(path)
    if path.is_file():
        return _describe_llama(path)
    raise UnknownModel(
        f"model {name_or_path!r} is neither a folder with a {CONFIG} nor a GGUF file nor one of: "
        f"{', '.join(sorted((*CONFIGS, *BUILT_IN)))}"
    )


def _built_in_config(name: str) -> Mapping[str, Any]:
    file = resources.files("engine.model.configs").joinpath(f"{name}.json")
    if not file.is_file():
        raise UnknownModel(
            f"model {name!r}: this installation has no config of it",
            hint=f"known: {', '.join(sorted(known for known in (*CONFIGS, *BUILT_IN) if known != name))}",
        )
    return json.loads(file.read_text("utf-8"))


def _describe_folder(path: Path) -> ModelInfo:
    raw = read_config(path)
    family = read_family(raw)
    if not any(path.glob("*.safetensors")) and not (path / INDEX).exists():
        return _describe_family(family, raw, num_files=0)
    folder, held = open_model(path)
    locate(folder, held, lambda _: True)
    found = _describe_family(held, raw, len(set(folder.shards.values())))
    if held == family:
        return found
    return replace(found, notes=(*found.notes, NO_DRAFTS))


def _describe_family(family: Family, raw: Mapping[str, Any], num_files: int) -> ModelInfo:
    """Caches as loading takes them without a word on it, or where it refuses that, as it asks for."""
    notes: tuple[str, ...] = ()
    config = family.config
    if isinstance(config, DeepseekConfig):
        caches = v41_layout(config)
        layers = tuple(
            LayerInfo(r.layer, r.role, r.ratio, r.kv_source, r.index_source) for r in layer_roles(config)
        )
    else:
        wants_released = "quantization_config" in raw
        released = wants_released and fills_groups(config)
        if wants_released and not released:
            notes = (
                "widths fill no group of the released caches: loads with caches='float32' alone "
                "(serve: workers.caches)",
            )
        caches = v4_layout(config, released=released)
        layers = tuple(
            LayerInfo(
                i,
                layer.attention,
                layer.ratio,
                i if layer.ratio else -1,
                i if layer.attention == "csa" else -1,
            )
            for i, layer in enumerate(config.layers)
        )
    return ModelInfo(
        family=family.model_type,
        num_tensors=sum(len(entry.stored(family.formats)) for entry in family.entries),
        parameters=_parameters(family.entries),
        active=Active(_active(family, Part(encoder_only=True)), _active(family, WHOLE)),
        caches=caches,
        max_positions=config.max_position_embeddings,
        layers=layers,
        num_files=num_files,
        notes=notes,
    )


def _parameters(entries: Iterable[Entry]) -> Parameters:
    sizes: Counter[str] = Counter()
    for entry in entries:
        is_matrix = entry.kind in ("dense", "expert") and ".engram." not in entry.name
        of_vocabulary = entry.name in ("embed.weight", "head.weight")
        of_backbone = entry.section != "backbone" or is_matrix or of_vocabulary
        sizes[entry.section if of_backbone else "other"] += entry.num_values
    return Parameters(sizes["backbone"], sizes["engram"], sizes["draft"], sizes["vision"], sizes["other"])


def _active(family: Family, part: Part) -> int:
    """Text only: of the routed experts those that are chosen; tables, which are looked up, do not count."""
    config = family.config
    chosen = config.num_experts_per_tok / config.n_routed_experts
    counted = (
        entry
        for entry in family.entries
        if entry.section == "backbone" and entry.kind != "ids" and entry.name != "embed.weight"
    )
    held = (entry for entry in counted if part.holds(entry.name, family.cut))
    return round(sum(entry.num_values * (chosen if entry.kind == "expert" else 1) for entry in held))


def _describe_llama(path: Path) -> ModelInfo:
    """From the metadata of its file, as the model reads it."""
    file = open_gguf(path)
    heads = file.integer("llama.attention.head_count")
    kv_heads = file.integer("llama.attention.head_count_kv", heads)
    head_dim = file.integer("llama.embedding_length") // heads
    num_layers = file.integer("llama.block_count")
    sizes = {name: prod(tensor.shape) for name, tensor in file.tensors.items()}
    total = sum(sizes.values())
    # A tied head multiplies the embedding's matrix; without one of its own, the embedding counts.
    looked_up = sizes.get("token_embd.weight", 0) if "output.weight" in sizes else 0
    return ModelInfo(
        family="llama",
        num_tensors=len(sizes),
        parameters=Parameters(total, 0, 0, 0, 0),
        active=Active(total - looked_up, total - looked_up),
        caches=CacheLayout(llama_bytes_per_token(num_layers, kv_heads, head_dim), 0, 0, None),
        max_positions=file.integer("llama.context_length"),
        layers=tuple(LayerInfo(layer, "full", 1, layer, -1) for layer in range(num_layers)),
        num_files=1,
    )
