"""Small V4.1 models with drafts and a vision tower, of random weights."""

from copy import deepcopy
from typing import Any

import torch
from golden_sets import RandomTensors, read
from torch import Tensor

from engine.checkpoint.family import read_family
from engine.model.deepseek.config import DeepseekConfig, Quantisation
from engine.model.deepseek.dspark import DraftModel
from engine.model.deepseek.dspark_context import DraftCache
from engine.model.deepseek.model import DeepseekModel
from engine.model.deepseek.rows import SequenceRows
from kernels.operations import select_operations

IMAGE = 3
DRAFTS: dict[str, Any] = {
    "num_nextn_predict_layers": 3, "dspark_block_size": 5, "dspark_noise_token_id": 4,
    "dspark_target_layer_ids": [9, 10, 11], "dspark_markov_rank": 16, "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
}  # fmt: skip
VISION = {
    "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 48,
    "patch_size": 4, "rope_theta": 10000, "downsample_ratio": 3, "max_image_tokens": 40, "min_pixels": 500,
    "max_wh_ratio": None,
}  # fmt: skip
COMPRESSED_IDS = torch.arange(298) % 241


def raw_config(**text: Any) -> dict[str, Any]:
    """config.json: golden set a's model with three draft blocks and a vision tower."""
    raw = deepcopy(read("a", "config.json"))
    raw["text_config"] |= DRAFTS | text
    return raw | {"vision_config": VISION}


def config_of(quantisation: Quantisation | None = None, **text: Any) -> DeepseekConfig:
    return DeepseekConfig.from_dict(raw_config(**text), quantisation or Quantisation())


def whole_tensors(raw: dict[str, Any]) -> dict[str, Tensor]:
    """Every tensor of the checkpoint, by released name."""
    random = RandomTensors()
    return {entry.name: random.take(entry.name, entry.shape) for entry in read_family(raw).entries}


def drafting_model(config: DeepseekConfig) -> tuple[DeepseekModel, DraftModel]:
    source = RandomTensors()
    model = DeepseekModel(config, source, select_operations(1), COMPRESSED_IDS)
    return model, DraftModel(model, source)


def text(count: int, seed: int = 0) -> list[int]:
    """Ids of no image."""
    noise = torch.Generator().manual_seed(seed)
    return torch.randint(5, 298, (count,), generator=noise).tolist()


def read_context(
    model: DeepseekModel, drafts: DraftModel, ids: list[int], chunk: int, slot: int = 0, **bounds: int
) -> DraftCache:
    """A draft cache of three slots that holds the context of a text, run in chunks."""
    model_cache, cache = model.new_cache(len(ids) // 16 + 1, 16, 1), drafts.new_cache(3)
    for start in range(0, len(ids), chunk):
        part, tap = ids[start : start + chunk], drafts.tap()
        rows = SequenceRows(0, range(model_cache.num_blocks), start, len(part), **bounds)
        model.forward(torch.tensor(part), [rows], model_cache, tap)
        drafts.write(cache, tap)
    if slot:
        cache.rings_BF[:, slot * cache.window :][:, : cache.window] = cache.rings_BF[:, : cache.window]
    return cache
