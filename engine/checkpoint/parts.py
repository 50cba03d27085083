"""Which weights one worker holds: its experts, and for a prefill worker the encoder alone. Imports no torch.

Source: fact sheet, sections 1.2 and 1.3. All tokens need the layers before the cut and, of the layer at the
cut, what makes its keys and values. The mix of streams that enters that layer comes from the layer before
it, so its own hyper-connections are not among them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from engine.checkpoint.family import Family
from engine.model.deepseek.config import DeepseekConfig
from protocol.errors import InvalidInput

_ROUTED = re.compile(r"(layers|mtp)\.(\d+)\.ffn\.experts\.(\d+)\.")  # `shared_experts` is another name
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_MAKES_ENTRIES = (
    "attn_norm.",
    "attn.wkv.",
    "attn.kv_norm.",
    "attn.compressor.",
    "attn.indexer.wk.",
    "attn.indexer.k_norm.",
)


Experts = frozenset[int] | Mapping[int, frozenset[int]]  # the same in each layer, or each layer's own


@dataclass(frozen=True, slots=True)
class Part:
    """None: all experts. `encoder_only` leaves out the decoder, the head and the draft blocks."""

    experts: Experts | None = None  # routed ones of the backbone
    draft_experts: Experts | None = None  # routed ones of the draft blocks
    encoder_only: bool = False

    def experts_of(self, layer: int) -> frozenset[int] | None:
        """Those held of a layer of the backbone; None: all."""
        return _of_layer(self.experts, layer)

    def draft_experts_of(self, block: int) -> frozenset[int] | None:
        """Those held of a draft block; None: all."""
        return _of_layer(self.draft_experts, block)

    def holds(self, name: str, cut: int) -> bool:
        """Whether a weight belongs to it; `cut` is the decoder's first layer."""
        return self._holds_expert(name) and (not self.encoder_only or _is_of_encoder(name, cut))

    def _holds_expert(self, name: str) -> bool:
        routed = _ROUTED.match(name)
        if routed is None:
            return True
        layer, expert = int(routed[2]), int(routed[3])
        held = self.experts_of(layer) if routed[1] == "layers" else self.draft_experts_of(layer)
        return held is None or expert in held


WHOLE = Part()


def rank_part(family: Family, rank: int, num_ranks: int, *, encoder_only: bool = False) -> Part:
    """The part of one rank of an expert-parallel group: consecutive experts, the same number for each rank.

    Raises InvalidInput where the ranks do not divide the experts.
    """
    if not 0 <= rank < num_ranks:
        raise InvalidInput(f"rank is {rank}, expected 0 to {num_ranks - 1}")
    config = family.config
    drafts = config.dspark_n_routed_experts if isinstance(config, DeepseekConfig) else config.n_routed_experts
    return Part(
        _share(config.n_routed_experts, rank, num_ranks), _share(drafts, rank, num_ranks), encoder_only
    )


def _of_layer(experts: Experts | None, layer: int) -> frozenset[int] | None:
    return experts.get(layer, frozenset()) if isinstance(experts, Mapping) else experts


def _share(num_experts: int, rank: int, num_ranks: int) -> frozenset[int]:
    if num_experts % num_ranks:
        raise InvalidInput(f"{num_ranks} ranks do not divide {num_experts} experts")
    each = num_experts // num_ranks
    return frozenset(range(rank * each, (rank + 1) * each))


def _is_of_encoder(name: str, cut: int) -> bool:
    found = _LAYER.match(name)
    if found is None:
        return not name.startswith(("mtp.", "norm.", "head.", "hc_head"))
    layer, rest = int(found[1]), found[2]
    return layer < cut or (layer == cut and rest.startswith(_MAKES_ENTRIES))
