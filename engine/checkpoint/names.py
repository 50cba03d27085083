"""Released names to the names in a folder's files: as they are, as a list beside them says, or transformers'.

Source of transformers' names: fact sheet, appendix A.2. Its V4 stacks the experts of a layer: their weights
are then parts of two tensors, gate and up projections one above the other.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from engine.errors import BrokenModelFile

NAMES = "names.json"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a weight stands: a tensor of the files, and for a stacked expert its index and half of rows."""

    stored: str
    expert: int | None = None
    half: int | None = None

    @property
    def is_whole(self) -> bool:
        return self.expert is None


Naming = Callable[[str], Place]

_ATTENTION = {
    "attn_sink": "sinks",
    "wq_a.weight": "q_a_proj.weight",
    "wq_b.weight": "q_b_proj.weight",
    "wkv.weight": "kv_proj.weight",
    "wo_a.weight": "o_a_proj.weight",
    "wo_b.weight": "o_b_proj.weight",
    "q_norm.weight": "q_a_norm.weight",
    "kv_norm.weight": "kv_norm.weight",
    "indexer.wq_b.weight": "compressor.indexer.q_b_proj.weight",
    "indexer.weights_proj.weight": "compressor.indexer.scorer.weights_proj.weight",
}
_COMPRESSOR = {
    "wkv.weight": "kv_proj.weight",
    "wgate.weight": "gate_proj.weight",
    "norm.weight": "kv_norm.weight",
    "ape": "position_bias",
}
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
    "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
    **{f"attn.{ours}": f"self_attn.{theirs}" for ours, theirs in _ATTENTION.items()},
    **{f"attn.compressor.{ours}": f"self_attn.compressor.{theirs}" for ours, theirs in _COMPRESSOR.items()},
    **{
        f"attn.indexer.compressor.{ours}": f"self_attn.compressor.indexer.{theirs}"
        for ours, theirs in _COMPRESSOR.items()
    },
    **{
        f"hc_{site}_{part}": f"{site}_hc.{part}"
        for site in ("attn", "ffn")
        for part in ("fn", "base", "scale")
    },
}
_TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
}
_IN_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"ffn\.experts\.(\d+)\.w([123])\.weight")


def read_naming(folder: Path, stored: Collection[str]) -> Naming:
    """The naming of a folder that holds these tensors. Raises BrokenModelFile for a list it cannot read."""
    if (folder / NAMES).exists():
        return _listed(folder / NAMES)
    if any(".self_attn." in name for name in stored):
        return transformers_v4
    if any(name.startswith("model.layers.") for name in stored):
        return saved_by_transformers
    return Place


def transformers_v4(name: str) -> Place:
    """The place under transformers' names of DeepSeek-V4; a name that it does not know stays as it is."""
    if name in _TOP:
        return Place(_TOP[name])
    if (found := _IN_LAYER.fullmatch(name)) is None:
        return Place(name)
    prefix, rest = f"model.layers.{found[1]}.", found[2]
    if expert := _EXPERT.fullmatch(rest):
        if expert[2] == "2":
            return Place(f"{prefix}mlp.experts.down_proj", int(expert[1]))
        return Place(f"{prefix}mlp.experts.gate_up_proj", int(expert[1]), half=0 if expert[2] == "1" else 1)
    return Place(prefix + _LAYER.get(rest, rest))


def saved_by_transformers(name: str) -> Place:
    """The place in a folder that `save_pretrained` has written: it turns most names back, and not all."""
    if name == "head.weight":
        return Place(name)
    if name in _TOP:
        return Place(_TOP[name])
    return Place("model." + name.replace(".attn.kv_norm.", ".attn.norm."))


def _listed(path: Path) -> Naming:
    """`names.json`: the files' names to the released ones. What it does not list has the released name."""
    try:
        listed: object = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenModelFile(f"{path}: no JSON ({error})") from error
    if not isinstance(listed, dict) or not all(
        isinstance(name, str) for name in cast(dict[str, object], listed).values()
    ):
        raise BrokenModelFile(f"{path}: expected an object of the files' names to the released ones")
    places: Mapping[str, Place] = {
        name: Place(stored) for stored, name in cast(dict[str, str], listed).items()
    }
    return lambda name: places.get(name, Place(name))
