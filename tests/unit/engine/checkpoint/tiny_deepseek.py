"""A tiny V4.1 model with every mechanism, as folders of random weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.checkpoint.family import read_family

TINY_TEXT = {
    "model_type": "deepseek_v41_text", "vocab_size": 64, "hidden_size": 64, "moe_intermediate_size": 32,
    "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32,
    "qk_rope_head_dim": 16, "q_lora_rank": 32, "o_lora_rank": 16, "o_groups": 2, "hidden_act": "silu",
    "swiglu_limit": 10.0, "rms_norm_eps": 1e-20,
    "tie_word_embeddings": False, "max_position_embeddings": 4096,
    "rope_theta": 10000, "rope_scaling": {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
    "original_max_position_embeddings": 256}, "n_routed_experts": 4, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc", "norm_topk_prob": True,
    "routed_scaling_factor": 1.5, "sliding_window": 8, "compress_ratios": [0, 2, 2, 1, 1, 1, 0, 0],
    "compress_rope_theta": 160000, "kv_source_layer_ids": [1, 3], "index_source_layer_ids": [1, 3, 5],
    "index_n_heads": 4, "index_head_dim": 32, "index_topk": 4, "candidate_source_layer_id": 3,
    "candidate_topk_blocks": 3, "candidate_block_size": 2, "hc_mult": 4, "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_layer_ids": [1], "engram_num_embeddings": [120], "engram_max_ngram_size": 3,
    "engram_vocab_size": 20,
    "engram_n_heads": 2, "engram_head_dim": 64, "engram_pad_token_id": 2, "engram_compressed_vocab_size": 60,
    "num_nextn_predict_layers": 2, "dspark_block_size": 3, "dspark_noise_token_id": 5,
    "dspark_target_layer_ids": [4, 5], "dspark_markov_rank": 16, "dspark_n_routed_experts": 2,
    "dspark_num_experts_per_tok": 1,
}  # fmt: skip
TINY: dict[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "dtype": "float32",
    "image_token_id": 3, "text_config": TINY_TEXT,
    "vision_config": {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2,
                      "intermediate_size": 24, "patch_size": 2, "downsample_ratio": 2},
}  # fmt: skip


def random_weights(config: Mapping[str, object], seed: int = 0) -> dict[str, Tensor]:
    """float32, by released name."""
    generator = torch.Generator().manual_seed(seed)
    return {
        entry.name: torch.randint(4, entry.shape, generator=generator)
        if entry.kind == "ids"
        else torch.randn(entry.shape, generator=generator)
        for entry in read_family(config).entries
    }


def write_folder(
    folder: Path, config: Mapping[str, object], tensors: Mapping[str, Tensor], shards: int = 1
) -> Path:
    """A folder in Hugging Face's form."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return folder
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        part = dict(list(tensors.items())[shard::shards])
        save_file(part, folder / f"shard-{shard}.safetensors")
        weight_map |= dict.fromkeys(part, f"shard-{shard}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder
