"""nano's weights while it trains: float32, under the released names, a layer's experts stacked in one tensor.

`layers.3.ffn.experts.w1` holds what a checkpoint has as `layers.3.ffn.experts.0.w1.weight`, …, so that a
layer's experts are one batch for the optimiser.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from engine.model.deepseek.config import DeepseekConfig

Parameters = dict[str, Tensor]
Named = Iterator[tuple[str, Tensor]]
_EXPERT_MATRICES = ("w1", "w2", "w3")


class Draw(Protocol):
    """Random values of the variance that keeps a product's scale, times `gain`."""

    def __call__(self, *shape: int, gain: float = 1.0) -> Tensor: ...


def initial_parameters(config: DeepseekConfig, seed: int) -> Parameters:
    """Random weights of the backbone. Each sub-layer's output starts small beside the streams."""
    noise = torch.Generator().manual_seed(seed)

    def matrix(*shape: int, gain: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=noise) * (gain / math.sqrt(shape[-1]))

    made: Parameters = {
        "embed.weight": torch.randn(config.vocab_size, config.hidden_size, generator=noise) * 0.5,
        "norm.weight": torch.ones(config.hidden_size),
        "head.weight": matrix(config.vocab_size, config.hidden_size, gain=0.5),
    }
    for layer in range(config.num_hidden_layers):
        made |= {f"layers.{layer}.{name}": t for name, t in _layer(config, layer, matrix)}
    return made


def released_tensors(parameters: Parameters) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint, experts apart, each name as the release has it."""
    for name, tensor in parameters.items():
        head, found, matrix = name.partition(".ffn.experts.")
        if not found:
            yield name, tensor
            continue
        for expert, each in enumerate(tensor):
            yield f"{head}.ffn.experts.{expert}.{matrix}.weight", each


def stacked(released: Mapping[str, Tensor]) -> Parameters:
    """The way back: a checkpoint's tensors, each layer's experts in one."""
    made: Parameters = {}
    stacks: dict[str, list[Tensor]] = {}
    for name, tensor in released.items():
        head, found, rest = name.partition(".ffn.experts.")
        if found:
            stacks.setdefault(f"{head}.ffn.experts.{rest.split('.')[1]}", []).append(tensor)
        else:
            made[name] = tensor
    return made | {name: torch.stack(tensors) for name, tensors in stacks.items()}


def draft_block(config: DeepseekConfig, matrix: Draw) -> Named:
    """A block of DSpark: attention over windows, its own experts (section 8.2)."""
    yield from _window_block(config, config.dspark_n_routed_experts, matrix)


def _layer(config: DeepseekConfig, layer: int, matrix: Draw) -> Named:
    yield from _window_block(config, config.n_routed_experts, matrix)
    if layer in config.kv_source_layer_ids:
        yield from _compressor(config, layer, matrix)
    if layer in config.index_source_layer_ids:
        heads = config.index_n_heads
        yield "attn.indexer.wq_b.weight", matrix(heads * config.index_head_dim, config.q_lora_rank)
        yield "attn.indexer.weights_proj.weight", matrix(heads, config.hidden_size)
    if layer in config.engram_layer_ids:
        yield from _engram(config, layer, matrix)


def _window_block(config: DeepseekConfig, num_experts: int, matrix: Draw) -> Named:
    """What every block has."""
    c, heads = config.hidden_size, config.num_attention_heads * config.head_dim
    yield "attn_norm.weight", torch.ones(c)
    yield "ffn_norm.weight", torch.ones(c)
    yield "attn.wq_a.weight", matrix(config.q_lora_rank, c)
    yield "attn.q_norm.weight", torch.ones(config.q_lora_rank)
    yield "attn.wq_b.weight", matrix(heads, config.q_lora_rank)
    yield "attn.wkv.weight", matrix(config.head_dim, c)
    yield "attn.kv_norm.weight", torch.ones(config.head_dim)
    yield "attn.attn_sink", torch.zeros(config.num_attention_heads)
    yield "attn.wo_a.weight", matrix(config.o_groups * config.o_lora_rank, heads // config.o_groups)
    yield "attn.wo_b.weight", matrix(c, config.o_groups * config.o_lora_rank, gain=0.3)
    for site in ("attn", "ffn"):
        yield from _site(config, site, matrix)
    yield from _experts(config, num_experts, matrix)


def _site(config: DeepseekConfig, site: str, matrix: Draw) -> Named:
    """Section 5: at first a sub-layer reads the mean of the streams, writes to all, and mixes them little."""
    streams = config.hc_mult
    width = streams * (2 + streams)
    base = torch.zeros(width)
    base[:streams] = -math.log(streams - 1.0)
    base[2 * streams :] = 4.0 * torch.eye(streams).flatten()
    yield f"hc_{site}_fn", matrix(width, streams * config.hidden_size)
    yield f"hc_{site}_base", base
    yield f"hc_{site}_scale", torch.full((3,), 0.1)


def _experts(config: DeepseekConfig, count: int, matrix: Draw) -> Named:
    c, inner = config.hidden_size, config.moe_intermediate_size
    yield "ffn.gate.weight", matrix(count, c)
    yield "ffn.gate.bias", torch.zeros(count)
    yield "ffn.gate.bias_vl", torch.zeros(count)
    for name in _EXPERT_MATRICES:
        out, into, gain = (c, inner, 0.3) if name == "w2" else (inner, c, 1.0)
        yield f"ffn.experts.{name}", matrix(count, out, into, gain=gain)
        yield f"ffn.shared_experts.{name}.weight", matrix(out, into, gain=gain)


def _compressor(config: DeepseekConfig, layer: int, matrix: Draw) -> Named:
    yield "attn.compressor.wkv.weight", matrix(config.head_dim, config.hidden_size)
    if config.ratio(layer) > 1:
        yield "attn.compressor.wgate.weight", matrix(config.head_dim, config.hidden_size)
    yield "attn.compressor.norm.weight", torch.ones(config.head_dim)
    yield "attn.indexer.wk.weight", matrix(config.index_head_dim, config.head_dim)
    yield "attn.indexer.k_norm.weight", torch.ones(config.index_head_dim)


def _engram(config: DeepseekConfig, layer: int, matrix: Draw) -> Named:
    """Section 7.3. The tables start small: their n-grams say nothing yet."""
    c, orders = config.hidden_size, config.engram_max_ngram_size - 1
    rows = config.engram_num_embeddings[config.engram_layer_ids.index(layer)]
    width = orders * config.engram_n_heads * config.engram_head_dim
    yield "engram.embed.weight", matrix(rows, config.engram_head_dim, gain=0.5)
    yield "engram.wkv.weight", matrix((config.hc_mult + 1) * c, width)
    yield "engram.q_weight", torch.ones(config.hc_mult, c)
    yield "engram.k_weight", torch.ones(config.hc_mult, c)
