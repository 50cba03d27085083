"""Effects on a checkpoint of a training's folder: measured window by window, and kept there.

It reads the training's float32 weights, of which each rounding can be told apart.
"""

import functools
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from engine.training.judging import AT_ONCE, Window, alike, evenly, in_groups, windows_of
from engine.training.nano import BEFORE_LAST_PART
from engine.training.network import Recall
from engine.training.paired import Difference
from engine.training.parameters import Parameters
from engine.training.saved import weights_of
from engine.training.spread import spread
from engine.training.sublayers import Rounding
from engine.training.table import Table, in_all, measure, recall_of, recalls
from engine.training.tensor_file import digest_of
from engine.training.trainer import CHECKPOINT, Plan, Progress, Task
from engine.training.variants import variants
from engine.training.workplace import Workplace, open_workplace

PLAN = Plan(tokens=1, batch_tokens=1)  # of which the length of a window is used alone
NAMES = tuple(variant.name for variant in variants(Rounding()))
FILE = {False: "effects.json", True: "effects_before_last_part.json"}  # by before_last_part


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

    @property
    def table(self) -> Path:
        """The file that keeps its effects."""
        return self.folder / FILE[self.before_last_part]


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

    names: tuple[str, ...]
    windows: int | None
    recall: bool = False


@dataclass(frozen=True, slots=True)
class Known:
    """A table, and what it is of: weights and held-out text by their digests."""

    weights: str
    text: str
    extent: Extent
    table: Table


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


def known_table(checkpoint: Checkpoint, extent: Extent) -> Table | None:
    """What is on record of these weights, to this extent, on this text. A file of another form is none."""
    if not checkpoint.table.exists() or not (checkpoint.place / CHECKPOINT).exists():
        return None
    try:
        known = msgspec.json.decode(checkpoint.table.read_bytes(), type=Known)
    except msgspec.ValidationError:
        return None
    return known.table if known == _known(checkpoint, extent, known.table) else None


def keep_table(checkpoint: Checkpoint, extent: Extent, table: Table) -> None:
    checkpoint.table.write_bytes(msgspec.json.encode(_known(checkpoint, extent, table)) + b"\n")


def _known(checkpoint: Checkpoint, extent: Extent, table: Table) -> Known:
    text = open_workplace(checkpoint.folder).about["digest"]
    return Known(digest_of(checkpoint.place / CHECKPOINT), text, extent, table)


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
    if not (checkpoint.place / CHECKPOINT).exists():
        return None  # before a folder is made that somebody has mistyped
    place = open_workplace(checkpoint.folder)
    task = place.task(PLAN)
    found = weights_of(checkpoint.place / CHECKPOINT)
    return None if found is None else Opened(place, task, found.parameters, Progress(**found.progress))


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
