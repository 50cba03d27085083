"""What each mechanism and each rounding is worth to a trained nano, on held-out text.

`python -m engine.training.effects --work DIR [--windows N] [--json]`. The loss of the same windows with one
thing changed, pair by pair, with standard errors over windows; and, since they tell smaller changes, the
divergence from the unchanged model's distribution and how often the likeliest token stays. It reads the
training's float32 weights, of which each rounding can be told apart.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import torch
from torch import Tensor

from engine.training.judging import Window, windows_of
from engine.training.network import Mode
from engine.training.parameters import Parameters, initial_parameters
from engine.training.ranks import Ranks
from engine.training.sublayers import Rounding
from engine.training.trainer import Plan, Task, Trainer
from engine.training.workplace import open_workplace

Change = Callable[[Parameters], Parameters]


@dataclass(frozen=True, slots=True)
class Variant:
    """One thing that is otherwise. `late`: only rows behind a prompt's end count, which replay changes."""

    name: str
    mode: Mode
    change: Change = dict
    late: bool = False


@dataclass(frozen=True, slots=True)
class Effect:
    """Against the unchanged model, with standard errors over windows. nats are by token."""

    name: str
    nats: float
    nats_error: float
    divergence: float
    divergence_error: float
    agreement: float  # share of rows whose likeliest token stays


def variants(rounding: Rounding) -> tuple[Variant, ...]:
    """The table of the model card."""
    plain = Mode(sparse=True)

    def rounded(**parts: object) -> Mode:
        return replace(plain, rounding=replace(Rounding(), **parts))

    return (
        Variant("main KV in FP4", rounded(main=rounding.main)),
        Variant("window KV in FP8", rounded(window=rounding.window)),
        Variant("index in MXFP4", rounded(index=rounding.index)),
        Variant("experts in MXFP4", rounded(experts=rounding.experts)),
        Variant("all released formats", replace(plain, rounding=rounding)),
        Variant("all groups instead of the indexer's choice", Mode()),
        Variant("compressed entries zeroed", plain, _zeroed(".compressor.norm.weight")),
        Variant("random choice of groups", plain, _random_indexers),
        Variant("Engram off", plain, _zeroed(".engram.wkv.weight")),
        Variant("decoder windows replayed", plain, late=True),
    )


def measure(task: Task, parameters: Parameters, windows: Sequence[Window]) -> list[Effect]:
    """Every variant over every window: as many passes as there are variants, and one."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    with torch.no_grad():
        for window in windows:
            base = _logits(task, parameters, window, Mode(sparse=True), None)
            for variant in variants(task.rounding):
                end = len(window.ids) // 2 if variant.late else None
                other = _logits(task, variant.change(parameters), window, variant.mode, end)
                rows = slice(0 if end is None else end, len(window.ids) - 1)
                found.setdefault(variant.name, []).append(_compared(base[rows], other[rows], window, rows))
    return [_effect(name, each) for name, each in found.items()]


def recall(task: Task, parameters: Parameters, windows: Sequence[Window]) -> float:
    """Share of the attention over groups that the indexer's choice would get, of all index sources."""
    shares: list[float] = []
    with torch.no_grad():
        for window in windows:
            _, found = task.network.forward(
                parameters, task.batches(_padded(task, window)), Mode(learn_index=True)
            )
            shares += [float(share) for share in found.recalls]
    return mean(shares)


def _logits(task: Task, parameters: Parameters, window: Window, mode: Mode, end: int | None) -> Tensor:
    batch = task.batches(_padded(task, window))
    if end is not None:
        batch = replace(batch, span_ends=torch.tensor([end]))
    hidden, _ = task.network.forward(parameters, batch, mode)
    return hidden[0, : len(window.ids)] @ parameters["head.weight"].T


def _padded(task: Task, window: Window) -> np.ndarray[tuple[int, int], np.dtype[np.uint16]]:
    step = task.network.config.sliding_window
    padded = np.zeros((1, -(-len(window.ids) // step) * step), np.uint16)
    padded[0, : len(window.ids)] = window.ids
    return padded


def _compared(base: Tensor, other: Tensor, window: Window, rows: slice) -> tuple[float, float, float]:
    """Mean nats more, mean divergence, agreement."""
    wanted = torch.tensor(window.ids[rows.start + 1 : rows.stop + 1]).unsqueeze(1)
    before, after = torch.log_softmax(base, -1), torch.log_softmax(other, -1)
    nats = (before.gather(1, wanted) - after.gather(1, wanted)).mean()
    divergence = (before.exp() * (before - after)).sum(-1).mean()
    agreement = (base.argmax(-1) == other.argmax(-1)).float().mean()
    return float(nats), float(divergence), float(agreement)


def _effect(name: str, each: Sequence[tuple[float, float, float]]) -> Effect:
    nats, divergence, agreement = zip(*each, strict=True)
    return Effect(name, mean(nats), _error(nats), mean(divergence), _error(divergence), mean(agreement))


def _error(values: Sequence[float]) -> float:
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def _zeroed(ending: str) -> Change:
    def change(parameters: Parameters) -> Parameters:
        return {
            name: torch.zeros_like(tensor) if name.endswith(ending) else tensor
            for name, tensor in parameters.items()
        }

    return change


def _random_indexers(parameters: Parameters) -> Parameters:
    noise = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(tensor.shape, generator=noise) if ".indexer.w" in name else tensor
        for name, tensor in parameters.items()
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m engine.training.effects", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--work", type=Path, required=True, help="the training's folder")
    parser.add_argument("--windows", type=int, default=64, help="of 1,024 held-out tokens, evenly spread")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    options = parser.parse_args(arguments)
    place = open_workplace(options.work)
    plan = Plan(tokens=1, batch_tokens=1)
    task = place.task(plan)
    trainer = Trainer(task, initial_parameters(task.network.config, 0), plan, Ranks())
    if not trainer.resume(place.folder):
        print(f"{place.folder}: no checkpoint; train first: python -m engine.training.nano", file=sys.stderr)
        return 2
    windows = windows_of(place.tokenizer, place.held_out, plan.long_length)
    windows = windows[:: max(len(windows) // options.windows, 1)][: options.windows]
    effects = measure(task, trainer.parameters, windows)
    said = {"seen": trainer.progress.seen, "recall": recall(task, trainer.parameters, windows)}
    _print(effects, said, as_json=options.json)
    return 0


def _print(effects: Sequence[Effect], said: Mapping[str, float], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**said, "effects": [asdict(effect) for effect in effects]}))
        return
    print(" ".join(f"{name} {value:,.3f}" for name, value in said.items()))
    for e in effects:
        print(
            f"{e.name:44} {e.nats:+.4f} ± {e.nats_error:.4f} nat, divergence {e.divergence:.5f} "
            f"± {e.divergence_error:.5f}, same token {e.agreement:.3f}"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
