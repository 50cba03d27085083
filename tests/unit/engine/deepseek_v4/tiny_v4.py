"""Tiny V4 models with every mechanism, of random weights."""

import zlib
from typing import Any

import torch
from torch import Tensor

from engine.model.deepseek.rows import SequenceRows
from engine.model.deepseek_v4.config import DeepseekV4Config, V4Quantisation
from engine.model.deepseek_v4.model import DeepseekV4Model
from kernels.operations import Profile, select_operations

TINY: dict[str, Any] = {
    "model_type": "deepseek_v4", "vocab_size": 128, "hidden_size": 64, "moe_intermediate_size": 32,
    "num_hidden_layers": 5, "num_attention_heads": 4, "head_dim": 72, "qk_rope_head_dim": 8,
    "q_lora_rank": 24, "o_groups": 2, "o_lora_rank": 16, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "sliding_window": 16, "compress_ratios": [0, 4, 8, 4, 8, 0], "num_hash_layers": 1,
    "index_n_heads": 16, "index_head_dim": 32, "index_topk": 4, "hc_mult": 4, "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6, "rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "rope_theta": 10000,
    "compress_rope_theta": 160000, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0,
    "num_nextn_predict_layers": 1,
    "rope_scaling": {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                     "original_max_position_embeddings": 256},
}  # fmt: skip
QUANTISED = {
    "released": V4Quantisation(),
    "fp8 index": V4Quantisation(index="fp8"),
    "off": V4Quantisation.off(),
}
WIDTHS: dict[str, dict[str, Any]] = {  # of heads and latents: such as the C library's fused operations take
    "in one call": {"head_dim": 80, "qk_rope_head_dim": 16, "q_lora_rank": 32},
    "composed": {},
}


class RandomTensors:
    """A source that has every tensor: values follow from the name, norms and scales are around 1."""

    def __contains__(self, name: object) -> bool:
        return True

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        if name.endswith("tid2eid"):
            return (
                torch.rand(shape[0], TINY["n_routed_experts"], generator=generator)
                .argsort(1)[:, : shape[1]]
                .float()
            )
        values = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            return 1 + 0.1 * values if "norm" in name or "scale" in name else 0.3 * values
        return 0.5 * values if name.endswith("ape") else values * 1.5 * shape[-1] ** -0.5

    def check_all_taken(self) -> None: ...


def tiny_config(quantisation: V4Quantisation = QUANTISED["off"], **fields: Any) -> DeepseekV4Config:
    return DeepseekV4Config.from_dict({**TINY, **fields}, quantisation)


def tiny_model(
    config: DeepseekV4Config | None = None, kind: Any = "auto", profile: Profile = "exact"
) -> DeepseekV4Model:
    return DeepseekV4Model(config or tiny_config(), RandomTensors(), select_operations(1, kind, profile))


def ids_of(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 128, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def run_chunks(
    model: DeepseekV4Model,
    ids: list[int],
    chunk: int,
    *,
    block_tokens: int = 16,
    start: int = 0,
    **rows: Any,
) -> Tensor:
    """Hidden states [T, C] of one sequence, run in chunks through a cache, a fresh one unless given."""
    num_blocks = -(-len(ids) // block_tokens)
    cache = rows.pop("cache", None) or model.new_cache(num_blocks, block_tokens, 1)
    parts: list[Tensor] = []
    for at in range(start, len(ids), chunk):
        part = ids[at : at + chunk]
        sequence = SequenceRows(0, range(num_blocks), at, len(part), **rows)
        parts.append(model.forward(torch.tensor(part), [sequence], cache))
    return torch.cat(parts)
