"""What each mechanism and each rounding is worth to a trained nano, on held-out text.

`python -m engine.training.effects --work DIR [--before-last-part] [--windows N|all] [--variants NAME …]
[--recall] [--processes 2] [--save] [--json]`. The loss of the same windows with one thing changed, pair by
pair, with standard errors over windows; and, since they tell smaller changes, the divergence from the
unchanged model's distribution and how often the likeliest token stays. It reads the training's float32
weights, of which each rounding can be told apart: those of `training.safetensors`, or those from before the
last part, which have not learnt to bear rounding. `--save` keeps the table in the folder for the model card.
"""

import argparse
import functools
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from engine.training.judging import (
    AT_ONCE,
    Measured,
    Window,
    alike,
    evenly,
    in_groups,
    padded,
    ratio,
    windows_of,
)
from engine.training.nano import BEFORE_LAST_PART
from engine.training.network import Mode, Recall
from engine.training.paired import Difference, Effect, compared, effect
from engine.training.parameters import Parameters, initial_parameters
from engine.training.ranks import Ranks
from engine.training.spread import spread
from engine.training.sublayers import Rounding
from engine.training.trainer import Plan, Progress, Task, Trainer
from engine.training.variants import Variant, variants
from engine.training.workplace import Workplace, open_workplace

PLAN = Plan(tokens=1, batch_tokens=1)  # of which the length of a window is used alone
NAMES = tuple(variant.name for variant in variants(Rounding()))
TABLE = {False: "effects.json", True: "effects_before_last_part.json"}  # by before_last_part


@dataclass(frozen=True, slots=True)
class Table:
    """Effects on one checkpoint, which had seen so many tokens in so many steps."""

    seen: int
    steps: int
    effects: tuple[Effect, ...]
    recall: Measured | None = None  # of the indexer, where it was asked for


@dataclass(frozen=True, slots=True)
class Part:
    """What some windows tell."""

    differences: dict[str, list[Difference]]
    recalls: list[Recall]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Which weights of a training's folder."""

    folder: Path
    before_last_part: bool

    @property
    def place(self) -> Path:
        return self.folder / BEFORE_LAST_PART if self.before_last_part else self.folder


@dataclass(frozen=True, slots=True)
class Opened:
    """A checkpoint in memory."""

    place: Workplace
    task: Task
    parameters: Parameters
    progress: Progress


@dataclass(frozen=True, slots=True)
class Extent:
    """Which variants, and on how many windows; None takes all. `recall`: of one window in eight."""

    names: Sequence[str]
    windows: int | None
    recall: bool = False


def measure_checkpoint(checkpoint: Checkpoint, extent: Extent, processes: int) -> Table | None:
    """None where there is no such checkpoint. Blocks for minutes."""
    opened = _opened(checkpoint)
    if opened is None:
        return None
    place = opened.place
    windows = evenly(windows_of(place.tokenizer, place.held_out, PLAN.long_length), extent.windows)
    groups = in_groups(alike(windows), AT_ONCE)
    parts = spread([partial(_measured, checkpoint, extent, tuple(g)) for g in groups], processes, _say)
    found = [each for part in parts for each in part.recalls]
    return Table(
        opened.progress.seen,
        opened.progress.steps,
        in_all(part.differences for part in parts),
        recall_of(found) if found else None,
    )


def in_all(parts: Iterable[Mapping[str, Sequence[Difference]]]) -> tuple[Effect, ...]:
    """Of the windows of all parts."""
    found: dict[str, list[Difference]] = {}
    for part in parts:
        for name, differences in part.items():
            found.setdefault(name, []).extend(differences)
    return tuple(effect(name, differences) for name, differences in found.items())


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


def _measured(checkpoint: Checkpoint, extent: Extent, windows: tuple[Window, ...]) -> Part:
    opened = _opened(checkpoint)
    assert opened is not None, "found before, and gone"
    task, parameters = opened.task, opened.parameters
    chosen = [variant for variant in variants(task.rounding) if variant.name in extent.names]
    step = task.network.config.sliding_window
    whole = [window for window in windows if len(window.ids) % step == 0][:1] if extent.recall else []
    found = [each for window in whole for each in recalls(task, parameters, window)]
    return Part(measure(task, parameters, windows, chosen), found)


@functools.cache
def _opened(checkpoint: Checkpoint) -> Opened | None:
    place = open_workplace(checkpoint.folder)
    task = place.task(PLAN)
    trainer = Trainer(task, initial_parameters(task.network.config, 0), PLAN, Ranks())
    if not trainer.resume(checkpoint.place):
        return None
    parameters = {name: tensor.detach() for name, tensor in trainer.parameters.items()}
    return Opened(place, task, parameters, trainer.progress)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def count_of(text: str) -> int | None:
    """A number of windows, or `all`."""
    return None if text == "all" else int(text)


def line(e: Effect) -> str:
    """For people."""
    return (
        f"{e.name:44} {e.nats.value:+.4f} ± {e.nats.error:.4f} nat, divergence {e.divergence.value:.5f} "
        f"± {e.divergence.error:.5f}, same token {e.agreement:.4f}"
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m engine.training.effects", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--work", type=Path, required=True, help="the training's folder")
    parser.add_argument("--before-last-part", action="store_true", help=f"the weights of {BEFORE_LAST_PART}/")
    parser.add_argument(
        "--windows", type=count_of, default=64, help="of 1,024 held-out tokens, evenly spread, or all"
    )
    parser.add_argument("--variants", nargs="+", choices=NAMES, default=NAMES, help="these alone")
    parser.add_argument("--recall", action="store_true", help="the indexer's, beside them")
    parser.add_argument("--processes", type=int, default=2, help="of one thread each")
    parser.add_argument("--save", action="store_true", help="keep the table in the folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    options = parser.parse_args(arguments)
    checkpoint = Checkpoint(options.work, options.before_last_part)
    extent = Extent(options.variants, options.windows, options.recall)
    table = measure_checkpoint(checkpoint, extent, options.processes)
    if table is None:
        _say(f"{checkpoint.place}: no checkpoint; train first: python -m engine.training.nano")
        return 2
    if options.save:
        (options.work / TABLE[options.before_last_part]).write_bytes(msgspec.json.encode(table) + b"\n")
    if options.json:
        print(msgspec.json.encode(table).decode())
    else:
        print(f"after {table.seen:,} tokens", *map(line, table.effects), sep="\n")
        if table.recall is not None:
            print(f"indexer's recall {table.recall.value:.3f} ± {table.recall.error:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
