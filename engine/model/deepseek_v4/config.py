"""The config of a DeepSeek-V4 model (fact sheet, appendix A.1), by the release's names or transformers'.

The release lists `compress_ratios` and `rope_scaling`; transformers says the same by `layer_types`,
`compress_rates`, `mlp_layer_types` and `rope_parameters`. Which layer is what is V4Shape's to resolve.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from engine.checkpoint.v4_shape import V4Shape
from engine.model.deepseek.config import YarnScaling
from engine.model.deepseek.config_fields import Fields
from engine.model.deepseek_v4.config_checks import check_config

IndexFormat = Literal["mxfp4", "fp8", "float32"]


@dataclass(frozen=True, slots=True)
class V4Quantisation:
    """In what the caches are kept (section 3); float32 where off. No config field carries it."""

    window: bool = True  # FP8 in groups of 64 channels, rotary channels in bfloat16
    main: bool = True  # the same record
    index: IndexFormat = "mxfp4"  # keys and queries

    @classmethod
    def off(cls) -> V4Quantisation:
        return cls(window=False, main=False, index="float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV4Config(V4Shape):
    """One text model. It is a TextShape of engine.model.deepseek: V4 has neither Engram nor candidates."""

    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: YarnScaling | None
    index_topk: int
    routed_scaling_factor: float
    swiglu_limit: float
    hc_sinkhorn_iters: int
    hc_eps: float
    quantisation: V4Quantisation = V4Quantisation()

    @classmethod
    def from_dict(
        cls, raw: Mapping[str, object], quantisation: V4Quantisation = V4Quantisation()
    ) -> DeepseekV4Config:
        """The config of a parsed config.json. Raises BrokenModelFile: field, value, what is expected."""
        shape, given = V4Shape.from_dict(raw), Fields(raw)
        _refuse_variants(given)
        rope_theta, compress_rope_theta, yarn = _rotary(given)
        config = cls(
            **{field.name: getattr(shape, field.name) for field in fields(V4Shape)},
            rms_norm_eps=given.number("rms_norm_eps"),
            rope_theta=rope_theta,
            compress_rope_theta=compress_rope_theta,
            rope_scaling=yarn,
            index_topk=given.integer("index_topk"),
            routed_scaling_factor=given.number("routed_scaling_factor"),
            swiglu_limit=given.number("swiglu_limit"),
            hc_sinkhorn_iters=given.integer("hc_sinkhorn_iters"),
            hc_eps=given.number("hc_eps"),
            quantisation=quantisation,
        )
        check_config(config)
        return config

    def ratio(self, layer: int) -> int:
        """Tokens that an entry of a layer stands for; 0 for window layers and draft blocks."""
        return self.layers[layer].ratio if layer < len(self.layers) else 0

    @property
    def candidate_topk_blocks(self) -> int:
        return 0

    @property
    def candidate_block_size(self) -> int:
        return 0

    @property
    def engram_max_ngram_size(self) -> int:
        return 0


def _refuse_variants(given: Fields) -> None:
    given.only("hidden_act", "silu", "silu")
    given.only("scoring_func", "sqrtsoftplus", "sqrtsoftplus")
    given.only("topk_method", "noaux_tc", "noaux_tc")
    given.only("norm_topk_prob", True, True)
    given.only("num_key_value_heads", 1, 1)
    given.only("tie_word_embeddings", False, False)
    given.only("attention_bias", False, False)
    given.only("mlp_bias", False, False)


def _rotary(given: Fields) -> tuple[float, float, YarnScaling | None]:
    """The base of window layers, that of the others, and the scaling of the others."""
    if "rope_parameters" not in given:
        yarn = _yarn(given.inside("rope_scaling")) if "rope_scaling" in given else None
        return given.number("rope_theta"), given.number("compress_rope_theta"), yarn
    parameters = given.inside("rope_parameters")
    if "main" not in parameters:
        return given.number("rope_theta"), given.number("compress_rope_theta"), _yarn(parameters)
    window, compressed = parameters.inside("main"), parameters.inside("compress")
    window.only("rope_type", "default", "default")
    return window.number("rope_theta"), compressed.number("rope_theta"), _yarn(compressed)


def _yarn(scaling: Fields) -> YarnScaling | None:
    if "factor" not in scaling and scaling.text("rope_type", "default") == "default":
        return None  # with a factor the type must be said: V3 calls it `type`, and YaRN would be lost
    scaling.only("rope_type", "yarn")
    for name in ("attention_factor", "mscale"):
        scaling.only(name, 1.0, 1.0)
    scaling.only("mscale_all_dim", 0.0, 0.0)
    return YarnScaling(
        factor=scaling.number("factor"),
        beta_fast=scaling.number("beta_fast", 32),
        beta_slow=scaling.number("beta_slow", 1),
        original_max_position_embeddings=scaling.integer("original_max_position_embeddings"),
    )
