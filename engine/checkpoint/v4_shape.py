"""The shape of a DeepSeek-V4 model, as far as its weights and caches go, from its config.json.

Source: fact sheet, appendix A.1. The release lists `compress_ratios`; transformers says the same by
`layer_types` and `compress_rates`. Both are read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

from engine.model.deepseek.config_fields import Fields, refuse

Attention = Literal["window", "csa", "hca"]

_CSA_RATIO = 4  # the ratio whose groups overlap, and which selects among them
_LAYER_TYPES: dict[str, Attention] = {
    "sliding_attention": "window",
    "compressed_sparse_attention": "csa",
    "heavily_compressed_attention": "hca",
}


@dataclass(frozen=True, slots=True)
class V4Layer:
    """`ratio`: tokens an entry of its cache stands for; 0 where it keeps a window only."""

    attention: Attention
    ratio: int


@dataclass(frozen=True, slots=True)
class V4Shape:
    """Fields carry the released names; `layers` resolves the ratios."""

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    hc_mult: int
    n_routed_experts: int
    num_experts_per_tok: int
    num_hash_layers: int  # the first ones: experts by token id
    index_n_heads: int
    index_head_dim: int
    sliding_window: int
    max_position_embeddings: int
    num_nextn_predict_layers: int
    layers: tuple[V4Layer, ...]

    @classmethod
    def from_dict(cls, raw: Mapping[str, object]) -> "V4Shape":
        """Raises BrokenModelFile: field, value, what is expected."""
        fields = Fields(raw)
        fields.only("model_type", "deepseek_v4")
        fields.only("n_shared_experts", 1, 1)
        layers = _layers(fields)
        optional = ("num_hash_layers", "num_nextn_predict_layers")
        names = [name for name in cls.__dataclass_fields__ if name != "layers" and name not in optional]
        values = {name: fields.integer(name) for name in names}
        hash_layers = _hash_layers(fields)
        drafts = fields.integer("num_nextn_predict_layers", 0, least=0)
        if len(layers) != values["num_hidden_layers"]:
            expected = f"the number of layers that the ratios describe, {len(layers)}"
            raise refuse("num_hidden_layers", values["num_hidden_layers"], expected)
        return cls(**values, num_hash_layers=hash_layers, num_nextn_predict_layers=drafts, layers=layers)


def _layers(fields: Fields) -> tuple[V4Layer, ...]:
    """What follows the backbone's layers in `compress_ratios` belongs to the draft block, a window layer."""
    if "layer_types" not in fields:
        ratios = fields.integers("compress_ratios")[: fields.integer("num_hidden_layers")]
        return tuple(V4Layer(_attention(ratio), ratio) for ratio in ratios)
    rates = fields.inside("compress_rates")
    names = _list(fields, "layer_types")
    if unknown := [name for name in names if str(name) not in _LAYER_TYPES]:
        raise refuse("layer_types", unknown[0], ", ".join(_LAYER_TYPES))
    kinds: list[Attention] = [_LAYER_TYPES[str(name)] for name in names]
    return tuple(
        V4Layer(kind, 0 if kind == "window" else rates.integer(str(name)))
        for name, kind in zip(names, kinds, strict=True)
    )


def _attention(ratio: int) -> Attention:
    if ratio == 0:
        return "window"
    return "csa" if ratio == _CSA_RATIO else "hca"


def _hash_layers(fields: Fields) -> int:
    if "mlp_layer_types" in fields and "num_hash_layers" not in fields:
        return _list(fields, "mlp_layer_types").count("hash_moe")
    return fields.integer("num_hash_layers", 0, least=0)


def _list(fields: Fields, name: str) -> list[object]:
    value = fields.raw[name]
    if not isinstance(value, list):
        raise refuse(name, value, "a list")
    return cast(list[object], value)
