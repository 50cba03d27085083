"""What each layer owns and what it reads of others (fact sheet, section 1.1)."""

from dataclasses import dataclass
from typing import Literal

from engine.model.deepseek.config import DeepseekConfig

Role = Literal["window", "full", "reindex", "reuse"]


@dataclass(frozen=True, slots=True)
class LayerRole:
    """One layer. `kv_source` and `index_source` are -1 for a window layer."""

    layer: int
    role: Role
    ratio: int
    kv_source: int  # the layer whose compressed entries it reads
    index_source: int  # the layer whose selection it uses
    makes_candidates: bool  # its scores choose the candidate blocks
    uses_candidates: bool  # its own selection stays inside them

    @property
    def owns_entries(self) -> bool:
        return self.role == "full"

    @property
    def owns_selection(self) -> bool:
        return self.role in {"full", "reindex"}


def layer_role(config: DeepseekConfig, layer: int) -> LayerRole:
    """kv_source = max{s in kv sources: s <= layer}, and so the index source; a checked config has both."""
    ratio = config.ratio(layer)
    if ratio == 0:
        return LayerRole(layer, "window", 0, -1, -1, False, False)
    kv_source = max(s for s in config.kv_source_layer_ids if s <= layer)
    index_source = max(s for s in config.index_source_layer_ids if s <= layer)
    role: Role = "reuse"
    if layer == kv_source:
        role = "full"
    elif layer == index_source:
        role = "reindex"
    candidates = config.candidate_source_layer_id
    return LayerRole(
        layer, role, ratio, kv_source, index_source,
        makes_candidates=layer == candidates,
        uses_candidates=0 <= candidates < layer and layer == index_source,
    )  # fmt: skip


def layer_roles(config: DeepseekConfig) -> tuple[LayerRole, ...]:
    """The backbone's layers in order."""
    return tuple(layer_role(config, layer) for layer in range(config.num_hidden_layers))


def cut_layer(config: DeepseekConfig) -> int:
    """The decoder's first layer: max(kv sources); the number of layers where there is none (section 1.2)."""
    return max(config.kv_source_layer_ids, default=config.num_hidden_layers)
