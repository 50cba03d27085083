"""The changes whose effect on nano is measured, in the form that was trained."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from engine.training.network import Mode
from engine.training.parameters import Parameters
from engine.training.sublayers import Rounding

Change = Callable[[Parameters], Parameters]
MAIN_IN_FP4 = "main KV in FP4"
WINDOW_IN_FP8 = "window KV in FP8"
INDEX_IN_MXFP4 = "index in MXFP4"
EXPERTS_IN_MXFP4 = "experts in MXFP4"
ZEROED = "compressed entries zeroed"
RANDOM_CHOICE = "random choice of groups"
ENGRAM_OFF = "Engram off"
REPLAYED = "decoder windows replayed"


@dataclass(frozen=True, slots=True)
class Variant:
    """One thing that is otherwise. `late`: only rows behind a prompt's end count, which replay changes."""

    name: str
    mode: Mode
    change: Change = dict
    late: bool = False


def variants(rounding: Rounding) -> tuple[Variant, ...]:
    """The table of the model card."""
    plain = Mode(sparse=True)

    def rounded(**parts: object) -> Mode:
        return replace(plain, rounding=replace(Rounding(), **parts))

    return (
        Variant(MAIN_IN_FP4, rounded(main=rounding.main)),
        Variant(WINDOW_IN_FP8, rounded(window=rounding.window)),
        Variant(INDEX_IN_MXFP4, rounded(index=rounding.index)),
        Variant(EXPERTS_IN_MXFP4, rounded(experts=rounding.experts)),
        Variant("all released formats", replace(plain, rounding=rounding)),
        Variant("all groups instead of the indexer's choice", Mode()),
        Variant(ZEROED, plain, zero_entries),
        Variant(RANDOM_CHOICE, plain, choose_at_random),
        Variant(ENGRAM_OFF, plain, silence_engram),
        Variant(REPLAYED, plain, late=True),
    )


def zero_entries(parameters: Parameters) -> Parameters:
    """Compressed entries that carry nothing: attention still sees them, with keys and values of zero."""
    return _zeroed(parameters, ".compressor.norm.weight")


def silence_engram(parameters: Parameters) -> Parameters:
    return _zeroed(parameters, ".engram.wkv.weight")


def choose_at_random(parameters: Parameters) -> Parameters:
    """Index queries, keys and head weights that know nothing."""
    noise = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(tensor.shape, generator=noise) if ".indexer.w" in name else tensor
        for name, tensor in parameters.items()
    }


def _zeroed(parameters: Parameters, ending: str) -> Parameters:
    return {
        name: torch.zeros_like(tensor) if name.endswith(ending) else tensor
        for name, tensor in parameters.items()
    }
