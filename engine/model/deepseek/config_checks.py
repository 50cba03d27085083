"""What must hold between the fields of a DeepSeek-V4.1 config, so that a wrong one does not run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from engine.model.deepseek.config_fields import refuse

if TYPE_CHECKING:
    from engine.model.deepseek.config import DeepseekConfig

Fault = tuple[str, str]  # field, what is expected
WINDOW_GROUP, MAIN_GROUP, INDEX_GROUP = 32, 16, 32  # channels that share a scale (section 3)


def check_config(config: DeepseekConfig) -> None:
    """Raises BrokenModelFile for the first fault: field, value, and what is expected."""
    for check in (_ids, _lists, _sharing, _candidates, _attention, _mixture, _engram, _draft, _quantisation):
        for field, expected in check(config):
            raise refuse(f"text_config.{field}", getattr(config, field), expected)


def _ids(c: DeepseekConfig) -> Iterator[Fault]:
    for field in ("bos_token_id", "eos_token_id", "pad_token_id"):
        token: int | None = getattr(c, field)
        if token is not None and token >= c.vocab_size:
            yield field, f"a token, below vocab_size, which is {c.vocab_size}"


def _lists(c: DeepseekConfig) -> Iterator[Fault]:
    length = c.num_hidden_layers + c.num_nextn_predict_layers
    if len(c.compress_ratios) not in {c.num_hidden_layers, length}:
        yield (
            "compress_ratios",
            f"{c.num_hidden_layers} ratios, one a layer, or {length} with the draft blocks",
        )
    if any(c.compress_ratios[c.num_hidden_layers :]):
        yield "compress_ratios", "0 for every draft block"
    for field in (
        "kv_source_layer_ids",
        "index_source_layer_ids",
        "engram_layer_ids",
        "dspark_target_layer_ids",
    ):
        ids: tuple[int, ...] = getattr(c, field)
        if sorted(set(ids)) != list(ids):
            yield field, "layers in ascending order, each once"
        if ids and ids[-1] >= c.num_hidden_layers:
            yield field, f"layers below num_hidden_layers, which is {c.num_hidden_layers}"


def _sharing(c: DeepseekConfig) -> Iterator[Fault]:
    """Section 1.1: what a layer reads must exist, and in the geometry that it expects."""
    for source in c.kv_source_layer_ids:
        if c.ratio(source) == 0:
            yield "kv_source_layer_ids", f"layers with a ratio above 0; compress_ratios[{source}] is 0"
        if source not in c.index_source_layer_ids:
            yield "index_source_layer_ids", f"every kv source; layer {source} is missing"
    for layer in c.index_source_layer_ids:
        if c.ratio(layer) == 0:
            yield "index_source_layer_ids", f"layers with a ratio above 0; compress_ratios[{layer}] is 0"
    for layer in range(c.num_hidden_layers):
        if c.ratio(layer) == 0:
            continue
        sources = [s for s in c.kv_source_layer_ids if s <= layer]
        if not sources:
            yield "compress_ratios", f"0 for layer {layer}: no kv source comes before it"
        elif c.ratio(layer) != c.ratio(sources[-1]):
            yield (
                "compress_ratios",
                (f"{c.ratio(sources[-1])} for layer {layer}, as its kv source, layer {sources[-1]}"),
            )


def _candidates(c: DeepseekConfig) -> Iterator[Fault]:
    if c.candidate_source_layer_id < 0:
        return
    if c.candidate_source_layer_id not in c.kv_source_layer_ids:
        yield "candidate_source_layer_id", f"one of kv_source_layer_ids, {list(c.kv_source_layer_ids)}, or -1"
    if c.kv_source_layer_ids and c.candidate_source_layer_id != c.kv_source_layer_ids[-1]:
        yield (
            "candidate_source_layer_id",
            (f"{c.kv_source_layer_ids[-1]}, the last kv source: later layers select among its entries"),
        )
    for field in ("candidate_topk_blocks", "candidate_block_size"):
        if getattr(c, field) < 1:
            yield field, "at least 1 where candidate_source_layer_id is set"


def _attention(c: DeepseekConfig) -> Iterator[Fault]:
    if c.num_attention_heads % c.o_groups:
        yield "o_groups", f"a divisor of num_attention_heads, which is {c.num_attention_heads}"
    if c.qk_rope_head_dim % 2 or c.qk_rope_head_dim > c.head_dim:
        yield "qk_rope_head_dim", f"an even number up to head_dim, which is {c.head_dim}"
    if c.qk_rope_head_dim > c.index_head_dim:
        yield "index_head_dim", f"at least qk_rope_head_dim, which is {c.qk_rope_head_dim}"
    yarn = c.rope_scaling
    if yarn is not None and yarn.factor < 1:
        yield "rope_scaling", "a factor of at least 1"
    if yarn is not None and c.compress_rope_theta <= 1:
        yield "compress_rope_theta", "a number above 1: YaRN divides by its logarithm"


def _mixture(c: DeepseekConfig) -> Iterator[Fault]:
    if c.num_experts_per_tok > c.n_routed_experts:
        yield "num_experts_per_tok", f"at most n_routed_experts, which is {c.n_routed_experts}"
    if c.image_token_id is not None and c.image_token_id >= c.vocab_size:
        yield "vocab_size", f"more than image_token_id, which is {c.image_token_id}"


def _engram(c: DeepseekConfig) -> Iterator[Fault]:
    if not c.engram_layer_ids:
        return
    if len(c.engram_num_embeddings) != len(c.engram_layer_ids):
        yield "engram_num_embeddings", f"{len(c.engram_layer_ids)} numbers, one for each of engram_layer_ids"
    for field, least in (
        ("engram_max_ngram_size", 2), ("engram_vocab_size", 2), ("engram_n_heads", 1), ("engram_head_dim", 1),
        ("engram_compressed_vocab_size", 1),
    ):  # fmt: skip
        if getattr(c, field) < least:
            yield field, f"at least {least} where engram_layer_ids names layers"
    if c.engram_pad_token_id >= c.vocab_size:
        yield "engram_pad_token_id", f"a token below vocab_size, which is {c.vocab_size}"


def _draft(c: DeepseekConfig) -> Iterator[Fault]:
    if c.num_nextn_predict_layers == 0 or c.dspark_block_size == 0:
        return
    if not c.dspark_target_layer_ids:
        yield "dspark_target_layer_ids", "the layers whose inputs the draft blocks read"
    if c.dspark_noise_token_id >= c.vocab_size:
        yield "dspark_noise_token_id", f"a token below vocab_size, which is {c.vocab_size}"
    if not 1 <= c.dspark_num_experts_per_tok <= c.dspark_n_routed_experts:
        yield (
            "dspark_num_experts_per_tok",
            f"1 to dspark_n_routed_experts, which is {c.dspark_n_routed_experts}",
        )
    if c.dspark_markov_rank < 1:
        yield "dspark_markov_rank", "at least 1 where dspark_block_size is set"


def _quantisation(c: DeepseekConfig) -> Iterator[Fault]:
    """Only where the caches are quantised: each group of channels is full."""
    groups = (
        (c.quantisation.window, "head_dim", WINDOW_GROUP, "FP8 window"),
        (c.quantisation.main, "head_dim", MAIN_GROUP, "FP4 main"),
        (c.quantisation.index, "index_head_dim", INDEX_GROUP, "MXFP4 index"),
    )
    for on, field, group, cache in groups:
        if on and getattr(c, field) % group:
            yield field, f"a multiple of {group}, the group of the {cache} cache, or caches='float32'"
