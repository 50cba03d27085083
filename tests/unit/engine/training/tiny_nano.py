"""A V4.1 model of nano's shape at a tenth of its width, and text-like tokens, for tests of the training."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from engine.model.deepseek.config import DeepseekConfig, Quantisation
from engine.model.deepseek.engram_hash import table_primes
from engine.training.batches import BatchMaker
from engine.training.network import Network
from engine.training.packing import Ids
from engine.training.parameters import Parameters, initial_parameters
from engine.training.rounding import released_rounding
from engine.training.shape import nano_config
from engine.training.trainer import Task
from engine.training.vocabulary import CONTROL

VOCABULARY, COMPRESSED = 96, 80
COMPRESSED_IDS = torch.arange(VOCABULARY).clamp(max=COMPRESSED - 1)
_SMALLER: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 32, "q_lora_rank": 32,
    "o_lora_rank": 32, "sliding_window": 8, "index_topk": 4, "candidate_topk_blocks": 3,
    "candidate_block_size": 2,
    "moe_intermediate_size": 32, "n_routed_experts": 4, "engram_vocab_size": 64,
    "engram_compressed_vocab_size": COMPRESSED,
}  # fmt: skip


class ControlTokens:
    """As much of a tokenizer as the shape asks for."""

    @staticmethod
    def token_to_id(text: str) -> int:
        return CONTROL.index(text)


def tiny_raw() -> dict[str, Any]:
    """config.json."""
    raw = nano_config(cast(Any, ControlTokens()), COMPRESSED, [])
    text = raw["text_config"] | _SMALLER
    primes = table_primes(cast(DeepseekConfig, SimpleNamespace(**text)))
    text["engram_num_embeddings"] = [sum(map(sum, layer)) for layer in primes]
    return raw | {"text_config": text}


def tiny_config(quantisation: Quantisation = Quantisation()) -> DeepseekConfig:  # noqa: B008 - frozen
    return DeepseekConfig.from_dict(tiny_raw(), quantisation)


def tiny_task(config: DeepseekConfig, length: int = 64) -> Task:
    return Task(Network.of(config, length), BatchMaker.of(config, COMPRESSED_IDS), released_rounding(config))


def stirred_parameters(config: DeepseekConfig, seed: int = 0) -> Parameters:
    """Initial weights with everything moved that starts out plain: norms, sinks, biases, mixings."""
    noise = torch.Generator().manual_seed(seed)

    def stirred(tensor: Tensor) -> Tensor:
        return tensor + 0.1 * torch.randn(tensor.shape, generator=noise)

    return {
        name: stirred(tensor)
        if tensor.dim() < 2 or name.endswith(("q_weight", "k_weight", "_fn"))
        else tensor
        for name, tensor in initial_parameters(config, seed).items()
    }


def repeating_tokens(count: int, seed: int = 0) -> Ids:
    """Words of three tokens that come again: something to learn."""
    noise = np.random.default_rng(seed)
    words = noise.integers(len(CONTROL), VOCABULARY, (6, 3))
    return words[noise.integers(0, len(words), count // 3 + 1)].reshape(-1)[:count].astype(np.uint16)
