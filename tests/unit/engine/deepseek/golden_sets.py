"""The golden sets of tests/data/v41_golden as models, and random tensors for other shapes."""

import json
import zlib
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from engine.model.deepseek.config import DeepseekConfig, Quantisation
from engine.model.deepseek.engram_hash import compress_ids
from engine.model.deepseek.hyper_connections import Stream
from engine.model.deepseek.model import DeepseekModel
from engine.model.deepseek.rows import Rows, SequenceRows
from engine.model.tensor_source import TensorsInMemory
from kernels.operations import Profile, select_operations

FOLDER = Path(__file__).parents[3] / "data" / "v41_golden"
SETS = ("a", "b")
LOGITS_TOLERANCE = {"a": 1e-3, "b": 2e-4}
STREAM_TOLERANCE = {"a": 5e-3, "b": 1e-3}


@dataclass(slots=True)
class Recorder:
    """An observer that keeps everything, row after row."""

    streams: dict[int, list[Stream]] = field(default_factory=dict)
    groups: dict[int, list[Tensor]] = field(default_factory=dict)
    blocks: dict[int, list[Tensor]] = field(default_factory=dict)

    def left(self, layer: int, stream: Stream, rows: Rows) -> None:
        self.streams.setdefault(layer, []).append(stream)

    def selected(self, layer: int, groups_TK: Tensor, blocks: dict[int, Tensor], rows: Rows) -> None:
        self.groups.setdefault(layer, []).append(groups_TK)
        self.blocks.setdefault(layer, []).extend(blocks.values())


def read(name: str, file: str) -> Any:
    return json.loads((FOLDER / name / file).read_text())


def golden_ids(name: str) -> list[int]:
    return read(name, "ids.json")


def array(name: str, file: str) -> Tensor:
    return torch.from_numpy(np.load(FOLDER / name / file))


def golden_config(name: str, quantisation: Quantisation | None = None) -> DeepseekConfig:
    """As the set was made: `a` with quantised caches, `b` without."""
    default = Quantisation() if name == "a" else Quantisation.off()
    return DeepseekConfig.from_dict(read(name, "config.json"), quantisation or default)


@lru_cache
def golden_tensors(name: str) -> dict[str, Tensor]:
    """By release names. Scales of the Engram tables are 1: the float values are the table."""
    names = read(name, "names.json")
    found = load_file(FOLDER / name / "model.safetensors")
    return {names[key]: tensor for key, tensor in found.items() if not names[key].endswith("embed.scale")}


def golden_model(
    name: str,
    *,
    config: DeepseekConfig | None = None,
    tensors: dict[str, Tensor] | None = None,
    kind: str = "auto",
    profile: Profile = "exact",
    compressed_ids: Tensor | None = None,
) -> DeepseekModel:
    """A set's model, or with another config or other tensors in place of some."""
    config = config or golden_config(name)
    source = TensorsInMemory({**golden_tensors(name), **(tensors or {})}, name)
    if config.engram_layer_ids and compressed_ids is None:
        compressed_ids = compress_ids(Tokenizer.from_file(str(FOLDER / name / "tokenizer.json")))
    return DeepseekModel(config, source, select_operations(1, kind, profile), compressed_ids)


class RandomTensors:
    """A source that has every tensor: values follow from the name, norms and scales are around 1."""

    def __contains__(self, name: object) -> bool:
        return True

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            return 1 + 0.1 * values if "norm" in name or "scale" in name else 0.3 * values
        return values * 1.5 * shape[-1] ** -0.5

    def check_all_taken(self) -> None: ...


def random_model(config: DeepseekConfig, compressed_ids: Tensor | None = None) -> DeepseekModel:
    return DeepseekModel(config, RandomTensors(), select_operations(1), compressed_ids)


def run_chunks(
    model: DeepseekModel, ids: list[int], chunk: int, *, block_tokens: int = 16, **bounds: int
) -> Tensor:
    """Hidden states [T, C] of one sequence, run in chunks through a fresh cache."""
    num_blocks = -(-len(ids) // block_tokens)
    cache = model.new_cache(num_blocks, block_tokens, 1)
    parts: list[Tensor] = []
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        rows = SequenceRows(0, range(num_blocks), start, len(part), **bounds)
        parts.append(model.forward(torch.tensor(part), [rows], cache))
    return torch.cat(parts)


def changed(config: DeepseekConfig, **fields: Any) -> DeepseekConfig:
    """A config with other values in some fields, unchecked."""
    return replace(config, **fields)
