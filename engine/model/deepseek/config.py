"""The shape of a DeepSeek-V4.1 model, from a checkpoint's config.json (fact sheet, section 11.1).

Fields carry the released names. Defaults are for fields that a model without the mechanism leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, Literal

from engine.model.deepseek.config_checks import check_config
from engine.model.deepseek.config_fields import Fields

ModelType = Literal["deepseek_v41", "deepseek_v4"]

_OF_THE_WHOLE = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")
_SPECIAL = ("model_type", "rope_scaling", "candidate_source_layer_id", "vision_config", "quantisation")


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Section 2.2. For layers with a compression ratio above 0; there is no attention factor."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class Quantisation:
    """Which caches keep the released formats (section 3); float32 where off. No config field carries it."""

    window: bool = True  # FP8, groups of 32
    main: bool = True  # FP4 with E4M3 scales, groups of 16
    index: bool = True  # MXFP4, groups of 32; keys and queries

    @classmethod
    def off(cls) -> Quantisation:
        return cls(window=False, main=False, index=False)


@dataclass(frozen=True, slots=True)
class DeepseekConfig:
    """One text model. `compress_ratios` may go on past the layers, for the draft blocks."""

    model_type: ModelType
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    max_position_embeddings: int
    rms_norm_eps: float
    # attention (section 2)
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    sliding_window: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: YarnScaling | None
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int  # -1: no second level, and no use for the next two
    # mixture of experts (section 6)
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    swiglu_limit: float
    # hyper-connections (section 5)
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    candidate_topk_blocks: int = 0
    candidate_block_size: int = 0
    # Engram (section 7)
    engram_layer_ids: tuple[int, ...] = ()
    engram_num_embeddings: tuple[int, ...] = ()
    engram_max_ngram_size: int = 0
    engram_vocab_size: int = 0
    engram_n_heads: int = 0
    engram_head_dim: int = 0
    engram_pad_token_id: int = 0
    engram_compressed_vocab_size: int = 0
    # DSpark (section 8)
    num_nextn_predict_layers: int = 0
    dspark_block_size: int = 0
    dspark_noise_token_id: int = 0
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int = 0
    dspark_n_routed_experts: int = 0
    dspark_num_experts_per_tok: int = 0
    # of the whole model
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    image_token_id: int | None = None
    vision_config: Mapping[str, object] | None = None
    quantisation: Quantisation = Quantisation()

    @classmethod
    def from_dict(
        cls,
        raw: Mapping[str, object],
        quantisation: Quantisation = Quantisation(),
    ) -> DeepseekConfig:
        """The config of a parsed config.json. Raises BrokenModelFile: field, value, what is expected."""
        top = Fields(raw)
        top.only("model_type", "deepseek_v41")
        text = top.inside("text_config")
        _refuse_variants(text)
        values: dict[str, Any] = {f.name: _read(top, text, f) for f in fields(cls) if f.name not in _SPECIAL}
        if "engram_pad_token_id" not in text and "engram_pad_id" in text:
            values["engram_pad_token_id"] = text.integer("engram_pad_id", least=0)  # the other spelling
        vision = top.raw.get("vision_config")
        config = cls(
            model_type="deepseek_v41",
            rope_scaling=_yarn(text),
            candidate_source_layer_id=_candidate_source(text),
            vision_config=None if vision is None else Fields(vision, "vision_config.").raw,
            quantisation=quantisation,
            **values,
        )
        check_config(config)
        return config

    def ratio(self, layer: int) -> int:
        """The compression ratio that a layer reads; 0 past the list (section 1.1)."""
        return self.compress_ratios[layer] if layer < len(self.compress_ratios) else 0


def _refuse_variants(text: Fields) -> None:
    text.only("hidden_act", "silu", "silu")
    text.only("scoring_func", "sqrtsoftplus")
    text.only("topk_method", "noaux_tc")
    text.only("norm_topk_prob", True, True)
    text.only("num_key_value_heads", 1, 1)
    text.only("n_shared_experts", 1, 1)
    text.only("tie_word_embeddings", False, False)
    text.only("gate_temp", 1.0, 1.0)
    for name in ("n_group", "topk_group"):  # of V3, whose router chooses among groups of experts first
        text.only(name, 1, 1)
    for name in ("num_hash_layers", "first_k_dense_replace"):  # of V4 and V3
        text.only(name, 0, 0)


def _read(top: Fields, text: Fields, field: Field[object]) -> object:
    """A field by its annotation: integers are at least 1 where they are required, else at least 0."""
    if field.name in _OF_THE_WHOLE:
        return top.integer(field.name, least=0) if field.name in top else None
    required = field.default is MISSING
    default = () if required else (field.default,)
    if field.type == "float":
        return text.number(field.name, *default)
    if field.type == "tuple[int, ...]":
        return text.integers(field.name, *default)
    return text.integer(field.name, *default, least=1 if required else 0)


def _yarn(text: Fields) -> YarnScaling | None:
    if "rope_scaling" not in text:
        return None
    yarn = text.inside("rope_scaling")
    yarn.only("rope_type", "yarn")
    for name in ("attention_factor", "mscale"):
        yarn.only(name, 1.0, 1.0)
    yarn.only("mscale_all_dim", 0.0, 0.0)
    return YarnScaling(
        factor=yarn.number("factor"),
        beta_fast=yarn.number("beta_fast"),
        beta_slow=yarn.number("beta_slow"),
        original_max_position_embeddings=yarn.integer("original_max_position_embeddings"),
    )


def _candidate_source(text: Fields) -> int:
    """Any negative number turns the second level off."""
    value = text.raw.get("candidate_source_layer_id", -1)
    if isinstance(value, int) and not isinstance(value, bool) and value < 0:
        return -1
    return text.integer("candidate_source_layer_id", least=0)
