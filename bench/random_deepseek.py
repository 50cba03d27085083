"""A DeepSeek-V4.1 of random weights, in memory or as a folder: every mechanism of the release, at any size.

Twelve layers in the pattern of the fact sheet's section 11.3: two of windows alone, kv sources at 2, 4 and 6
(the decoder's first), index sources at 8 and 10 beside them. Engram stands where the release has it, in the
second layer and a third of the way up. There are neither drafts nor a vision tower.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.entries import GROUP, Entry
from engine.checkpoint.folder_writer import FolderWriter
from engine.checkpoint.formats import as_e8m0
from engine.checkpoint.inventory import v41_entries
from engine.model.deepseek.config import DeepseekConfig
from engine.model.deepseek.engram_hash import table_primes
from engine.model.deepseek.model import DeepseekModel
from engine.model.tensor_source import TensorsInMemory
from kernels.operations import select_operations

_SEED = 41
_SHARD_BYTES = 256 << 20
_PATTERN_BYTES = 64 << 20  # of a table; the rest repeats it
_FINITE = 0b1011_1111  # of E4M3: magnitudes below 2, neither infinite nor NaN
_SCALE = 120  # E8M0: 2^-7


@dataclass(frozen=True, slots=True)
class Size:
    """By default about 50 million parameters that a token uses."""

    vocabulary: int = 2048
    hidden: int = 576
    heads: int = 16
    head_channels: int = 64
    rope_channels: int = 16
    query_rank: int = 192
    output_groups: int = 4
    output_rank: int = 128
    inner: int = 224  # channels of an expert
    experts: int = 16
    experts_per_token: int = 6
    window: int = 128
    index_heads: int = 16
    index_channels: int = 32
    selected: int = 128  # entries a row
    candidate_blocks: int = 256  # of eight positions
    engram_rows_a_head: int = 8192  # about
    engram_heads: int = 8
    engram_channels: int = 32
    positions: int = 65_536


def config_json(size: Size) -> dict[str, Any]:
    """config.json in the released form."""
    text: dict[str, Any] = {
        "model_type": "deepseek_v41_text", "vocab_size": size.vocabulary, "hidden_size": size.hidden,
        "num_hidden_layers": 12, "max_position_embeddings": size.positions, "rms_norm_eps": 1e-20,
        "hidden_act": "silu", "tie_word_embeddings": False, "num_attention_heads": size.heads,
        "num_key_value_heads": 1, "head_dim": size.head_channels, "qk_rope_head_dim": size.rope_channels,
        "q_lora_rank": size.query_rank, "o_lora_rank": size.output_rank, "o_groups": size.output_groups,
        "sliding_window": size.window, "rope_theta": 10_000, "compress_rope_theta": 160_000,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
            "original_max_position_embeddings": 16_384,
        },
        "compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1], "kv_source_layer_ids": [2, 4, 6],
        "index_source_layer_ids": [2, 4, 6, 8, 10], "index_n_heads": size.index_heads,
        "index_head_dim": size.index_channels, "index_topk": size.selected, "candidate_source_layer_id": 6,
        "candidate_topk_blocks": size.candidate_blocks, "candidate_block_size": 8,
        "moe_intermediate_size": size.inner, "n_routed_experts": size.experts, "n_shared_experts": 1,
        "num_experts_per_tok": size.experts_per_token, "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
        "engram_layer_ids": [1, 4], "engram_num_embeddings": [1, 1], "engram_max_ngram_size": 4,
        "engram_vocab_size": size.engram_rows_a_head, "engram_n_heads": size.engram_heads,
        "engram_head_dim": size.engram_channels, "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": size.vocabulary, "num_nextn_predict_layers": 0,
    }  # fmt: skip
    raw = {
        "architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "dtype": "bfloat16",
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "text_config": text,
    }  # fmt: skip
    primes = table_primes(DeepseekConfig.from_dict(raw))
    text["engram_num_embeddings"] = [sum(map(sum, layer)) for layer in primes]
    return raw


def active_parameters(config: DeepseekConfig) -> int:
    """That one token uses: all but experts that it is not sent to, and rows that it does not look up."""
    share = config.num_experts_per_tok / config.n_routed_experts
    used = (
        entry.num_values * (share if ".ffn.experts." in entry.name else 1)
        for entry in v41_entries(config)
        if entry.kind != "table" and entry.section in ("backbone", "engram")
    )
    return round(sum(used))


def compressed_ids(config: DeepseekConfig) -> Tensor:
    """int64 [vocabulary]: every token is its own, as there is no tokenizer."""
    return torch.arange(config.vocab_size)


def random_model(raw: Mapping[str, object], threads: int) -> DeepseekModel:
    """In memory, tables included. Blocks for seconds."""
    config = DeepseekConfig.from_dict(raw)
    noise = torch.Generator().manual_seed(_SEED)
    tensors = {entry.name: _values(entry, noise) for entry in v41_entries(config)}
    source = TensorsInMemory(tensors, "random weights")
    return DeepseekModel(config, source, select_operations(threads), compressed_ids(config))


def write_folder(target: Path, raw: Mapping[str, object], shard_bytes: int = _SHARD_BYTES) -> int:
    """A folder that `open_checkpoint` reads, Engram tables in FP8 as released; the tables' bytes.

    Needs memory for one table; raises as FolderWriter does. Blocks.
    """
    config = DeepseekConfig.from_dict(raw)
    noise = torch.Generator().manual_seed(_SEED)
    table_bytes = 0
    with FolderWriter(target, shard_bytes) as writer:
        for entry in v41_entries(config):
            if entry.kind == "table":
                values, scales = _table(entry, noise)
                writer.add(entry.name, values)
                writer.add(entry.scale_name, scales)
                table_bytes += values.nbytes + scales.nbytes
            else:
                values = _values(entry, noise)
                writer.add(entry.name, values if entry.kind == "exact" else values.bfloat16())
        writer.finish(raw)
    return table_bytes


def _values(entry: Entry, noise: torch.Generator) -> Tensor:
    """Norms and scales about 1, biases and sinks small, matrices that keep the size of what they multiply."""
    values = torch.randn(entry.shape, generator=noise)
    if len(entry.shape) == 1:
        about_1 = "norm" in entry.name or "scale" in entry.name
        return 1 + 0.1 * values if about_1 else 0.3 * values
    return values * entry.shape[-1] ** -0.5


def _table(entry: Entry, noise: torch.Generator) -> tuple[Tensor, Tensor]:
    """FP8 values and a scale for each 32 of a row."""
    rows, columns = entry.shape
    total = rows * columns
    pattern = torch.randint(
        0, 256, (min(total, _PATTERN_BYTES),), dtype=torch.uint8, generator=noise
    ).bitwise_and_(_FINITE)
    values = pattern.repeat(-(-total // len(pattern)))[:total].view(rows, columns)
    scales = torch.full((rows, columns // GROUP), _SCALE, dtype=torch.uint8)
    return values.view(torch.float8_e4m3fn), as_e8m0(scales)
