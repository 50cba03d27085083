"""What is measured of a released nano, window by window; each part runs in some process of its own.

T rows, V vocabulary. Loss, effects and drafts are those of the serving model in the profile `exact`; recall
needs the attention over all groups, which the training's network shows.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from engine.model.base import Model
from engine.model.deepseek.config import Quantisation
from engine.model.deepseek.dspark_acceptance import accepted_lengths
from engine.model.deepseek.model import DeepseekModel
from engine.model.registry import load_model
from engine.training.judging import Window
from engine.training.network import Recall
from engine.training.paired import Difference, compared
from engine.training.shipped import (
    Read,
    open_shipped,
    read_as_served,
    read_behind_hit,
    read_replayed,
    read_whole,
)
from engine.training.table import recalls
from engine.training.variants import (
    ENGRAM_OFF,
    INDEX_IN_MXFP4,
    MAIN_IN_FP4,
    RANDOM_CHOICE,
    REPLAYED,
    WINDOW_IN_FP8,
    ZEROED,
    Change,
    choose_at_random,
    silence_engram,
    zero_entries,
)

ALL_CACHES, BEHIND_HIT = "all caches as released", "windows replayed behind a prefix hit"
AS_SERVED = "both replays, as a request behind a prefix hit"
_FIRST_ANCHOR = 64  # of a window: drafts see a whole window of context


@dataclass(frozen=True, slots=True)
class Served:
    """One thing that is otherwise than in the shipped weights with caches in float32 and without replay."""

    name: str
    quantisation: Quantisation = Quantisation.off()  # noqa: RUF009 - frozen
    change: Change = dict
    read: Read = read_whole

    @property
    def late(self) -> bool:
        """Whether only rows behind the prompt count, which a replay changes."""
        return self.read is not read_whole

    @property
    def names(self) -> tuple[str, ...]:
        """Of what is measured with it: a replay's effect fades, so its first window stands by itself."""
        return (self.name, first_window(self.name)) if self.late else (self.name,)

    def rows(self, count: int, window: int, block: int) -> dict[str, slice]:
        """Which of `count` rows of a text count, by name. `window` and `block`: the model's."""
        found = {self.name: slice(count // 2 if self.late else 0, count - 1)}
        behind = count // 2 // block * block if self.read is read_behind_hit else count // 2
        if self.late and window < behind < count - 1:  # else nothing is replayed
            found[first_window(self.name)] = slice(behind, min(behind + window, count - 1))
        return found


def first_window(name: str) -> str:
    """Of the rows right behind the prompt, or behind the hit where that is the prompt."""
    return f"{name}, the first window"


BASE, RELEASED = Served("float32 caches"), Served(ALL_CACHES, Quantisation())
SERVED = (
    Served(MAIN_IN_FP4, Quantisation(window=False, main=True, index=False)),
    Served(WINDOW_IN_FP8, Quantisation(window=True, main=False, index=False)),
    Served(INDEX_IN_MXFP4, Quantisation(window=False, main=False, index=True)),
    RELEASED,
    Served(ZEROED, change=zero_entries),
    Served(RANDOM_CHOICE, change=choose_at_random),
    Served(ENGRAM_OFF, change=silence_engram),
    Served(REPLAYED, read=read_replayed),
    Served(BEHIND_HIT, read=read_behind_hit),
    Served(AS_SERVED, read=read_as_served),
)
EFFECTS = tuple(name for variant in SERVED for name in variant.names)


@dataclass(frozen=True, slots=True)
class Nats:
    """Of a window, summed over its tokens but the first."""

    nats: float
    tokens: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Found:
    """What a part has measured: one of these."""

    nats: list[Nats] = field(default_factory=list[Nats])  # a window
    differences: dict[str, list[Difference]] = field(default_factory=dict[str, list[Difference]])
    recalls: list[Recall] = field(default_factory=list[Recall])  # an index source
    lengths: list[int] = field(default_factory=list[int])  # an anchor


Part = Callable[[], Found]


def judging(folder: Path, windows: Sequence[Window]) -> Part:
    """The loss of the model as `load_model` gives it, every row through every layer."""
    return partial(_judged, folder, tuple(windows))


def comparing(folder: Path, windows: Sequence[Window]) -> Part:
    """Every variant against the unchanged model."""
    return partial(_compared, folder, tuple(windows))


def recalling(folder: Path, window: Window) -> Part:
    """Of each index source; attention is over all groups, of caches in float32."""
    return partial(_recalled, folder, window)


def drafting(folder: Path, window: Window, stride: int) -> Part:
    """Of the drafts from every `stride`-th position, how many the model goes on with."""
    return partial(_drafted, folder, window, stride)


def nats_of(logits_TV: Tensor, ids: Sequence[int]) -> float:
    """Of all tokens but the first, summed."""
    return float(cross_entropy(logits_TV[:-1], torch.tensor(ids[1:]), reduction="sum"))


def _judged(folder: Path, windows: Sequence[Window]) -> Found:
    model = _loaded(folder)
    return Found(
        nats=[
            Nats(nats_of(model.logits(window.ids), window.ids), len(window.ids) - 1, window.num_bytes)
            for window in windows
        ]
    )


def _compared(folder: Path, windows: Sequence[Window]) -> Found:
    found: dict[str, list[Difference]] = {name: [] for name in EFFECTS}
    for window in windows:
        base = _served(folder, BASE)
        base_TV = BASE.read(base, window.ids)
        for variant in SERVED:
            other_TV = variant.read(_served(folder, variant), window.ids)
            places = variant.rows(len(window.ids), base.config.sliding_window, base.block_tokens)
            for name, rows in places.items():
                found[name].append(compared(base_TV[rows], other_TV[rows], window, rows))
    return Found(differences=found)


def _recalled(folder: Path, window: Window) -> Found:
    shipped = open_shipped(folder)
    return Found(recalls=recalls(shipped.task(len(window.ids)), shipped.parameters, window))


def _drafted(folder: Path, window: Window, stride: int) -> Found:
    model = _served(folder, RELEASED)
    drafts = open_shipped(folder).drafts(model)
    lengths = accepted_lengths(model, drafts, window.ids, first=_FIRST_ANCHOR, stride=stride)
    return Found(lengths=cast(list[int], lengths.tolist()))  # pyright: ignore[reportUnknownMemberType]


@functools.cache
def _served(folder: Path, variant: Served) -> DeepseekModel:
    shipped = open_shipped(folder)
    return shipped.served(variant.quantisation, variant.change(shipped.parameters))


@functools.cache
def _loaded(folder: Path) -> Model:
    return load_model(str(folder), threads=1)
