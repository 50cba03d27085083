"""The table of effects: the same windows with one thing changed, and what that did to them.

B windows a pass, T tokens, V vocabulary, C channels. Rows run on the training's network.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.training.judging import Measured, Window, padded, ratio
from engine.training.network import Mode, Recall
from engine.training.paired import Difference, Effect, compared, effect
from engine.training.parameters import Parameters
from engine.training.trainer import Task
from engine.training.variants import Variant


@dataclass(frozen=True, slots=True)
class Table:
    """Effects on one checkpoint, which had seen so many tokens in so many steps."""

    seen: int
    steps: int
    effects: tuple[Effect, ...]
    recall: Measured | None = None  # of the indexer, where it was asked for


def in_all(parts: Iterable[Mapping[str, Sequence[Difference]]]) -> tuple[Effect, ...]:
    """Of the windows of all parts; what no window had rows for is left out."""
    found: dict[str, list[Difference]] = {}
    for part in parts:
        for name, differences in part.items():
            found.setdefault(name, []).extend(differences)
    return tuple(effect(name, differences) for name, differences in found.items() if differences)


@torch.no_grad()
def measure(
    task: Task, parameters: Parameters, windows: Sequence[Window], chosen: Sequence[Variant]
) -> dict[str, list[Difference]]:
    """Every variant over windows that share a pass: as many passes as there are variants, and one."""
    base_BTC = _hidden(task, parameters, windows, Variant("", Mode(sparse=True)))
    found: dict[str, list[Difference]] = {}
    for variant in chosen:
        changed = variant.change(parameters)
        other_BTC = _hidden(task, changed, windows, variant)
        for row, window in enumerate(windows):
            rows = slice(_prompt(window) if variant.late else 0, len(window.ids) - 1)
            base_TV = base_BTC[row, rows] @ parameters["head.weight"].T
            other_TV = other_BTC[row, rows] @ changed["head.weight"].T
            found.setdefault(variant.name, []).append(compared(base_TV, other_TV, window, rows))
    return found


@torch.no_grad()
def recalls(task: Task, parameters: Parameters, window: Window) -> list[Recall]:
    """Of each index source, of a window that no row is padded to."""
    ids = padded([window], task.network.config.sliding_window)
    _, found = task.network.forward(parameters, task.batches(ids), Mode(learn_index=True))
    return found.recalls


def recall_of(found: Sequence[Recall]) -> Measured:
    """The share of what the best choice would get."""
    return ratio([each.got for each in found], [each.best for each in found])


def _hidden(task: Task, parameters: Parameters, windows: Sequence[Window], variant: Variant) -> Tensor:
    batch = task.batches(padded(windows, task.network.config.sliding_window))
    if variant.late:
        batch = replace(batch, span_ends=torch.tensor([_prompt(window) for window in windows]))
    return task.network.forward(parameters, batch, variant.mode)[0]


def _prompt(window: Window) -> int:
    """Tokens of it that a replay takes for the prompt."""
    return len(window.ids) // 2
