"""How much of Engram's look-up time is hidden behind the layers before it.

`python -m bench.engram_lookup --json [--quick]`. A random DeepSeek-V4.1 whose Engram tables stay in their
file, memory-mapped, and are larger than the memory that the process is given. Two kinds of steps take turns,
each on token ids of its own, so that no step finds what another has read: `ahead`, the look-ups issued before
layer 0 and waited for at their layer, as the model does it; `at_layer`, the same look-ups begun when their
layer is reached. The reading thread, the file and the layers are the same. Steps have one row, sixteen rows
of sixteen sequences (the value), or 128 rows of one. The milliseconds hidden are the difference of the two
steps, the share is that of the time that reading the rows takes at the layer. What was asked for and what
came from the disk are told too.

The verdict is of the pairs of steps of sixteen rows: that looking ahead is faster in so many of them that a
coin would bring as many once in twenty times. Without look-ahead it would be a coin.

Memory is limited by a cgroup (version 1 or 2), in which a process of its own measures. Where none can be
made, the file's pages are dropped before each step instead, and `limit` says so.
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import comb, inf
from pathlib import Path
from statistics import median
from typing import Literal

import msgspec
import torch
from torch import Tensor

from bench import common
from bench.page_cache import drop_pages, memory_group
from bench.random_deepseek import Size as ModelSize
from bench.random_deepseek import compressed_ids, config_json, write_folder
from engine.checkpoint.source import CheckpointSource, open_checkpoint
from engine.model.deepseek.config import DeepseekConfig
from engine.model.deepseek.hyper_connections import Stream
from engine.model.deepseek.model import DeepseekModel
from engine.model.deepseek.rows import Rows, SequenceRows
from engine.model.tensor_source import RowTable
from kernels.operations import select_operations

JUDGED, TARGET = "16", 1.0  # a step that looks ahead takes less
CHANCE = 0.05  # at most, of as many faster steps by luck
STEPS: dict[str, tuple[int, int]] = {"1": (1, 1), JUDGED: (16, 1), "128": (1, 128)}  # sequences, rows of each
BLOCK = 64
Limit = Literal["cgroup", "pages dropped"]
_ROOT = Path(__file__).parent.parent
_GATE_S = 600.0  # a look-up whose layer never comes


@dataclass(frozen=True, slots=True)
class Size:
    """`rows_a_head` of 48 heads of 33 bytes make the tables; `limit_bytes` are less."""

    pairs: int
    rows_a_head: int
    limit_bytes: int


FULL = Size(pairs=60, rows_a_head=1_400_000, limit_bytes=1 << 30)  # 2.2 GB
QUICK = Size(pairs=15, rows_a_head=800_000, limit_bytes=1 << 30)  # 1.27 GB


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step: its time, that of reading its rows, what it asked for, and what came from the disk."""

    step_ms: float
    reading_ms: float
    asked_bytes: int
    read_bytes: int


@dataclass(frozen=True, slots=True)
class Verdict(common.Comparison):
    """Less is better. `at_most`: what the ratio stays below but for `CHANCE`."""

    at_most: float

    @property
    def met(self) -> bool:
        return self.at_most < self.target


class Gate:
    """Lets look-ups begin: at once, or when their layer is reached. An observer of the model's steps."""

    def __init__(self) -> None:
        self._reached = -1
        self._at_layer = False
        self._changed = threading.Condition()
        self.reading_s, self.asked_bytes = 0.0, 0

    def begin(self, *, at_layer: bool) -> None:
        """Before a step."""
        with self._changed:
            self._reached, self._at_layer = 0, at_layer
            self.reading_s, self.asked_bytes = 0.0, 0

    def wait(self, layer: int) -> None:
        """Called by the reading thread."""
        with self._changed:
            self._changed.wait_for(lambda: not self._at_layer or self._reached >= layer, _GATE_S)

    def left(self, layer: int, stream: Stream, rows: Rows) -> None:
        with self._changed:
            self._reached = layer + 1
            self._changed.notify_all()

    def selected(self, layer: int, groups_TK: Tensor, blocks: dict[int, Tensor], rows: Rows) -> None:
        """Of no interest here."""


@dataclass(frozen=True, slots=True)
class GatedTable:
    """A table behind the gate; notes how long it reads."""

    table: RowTable
    layer: int
    row_bytes: int
    gate: Gate

    def rows(self, ids: Tensor) -> Tensor:
        self.gate.wait(self.layer)
        start_s = time.perf_counter()
        found = self.table.rows(ids)
        self.gate.reading_s += time.perf_counter() - start_s
        self.gate.asked_bytes += len(ids) * self.row_bytes
        return found


class GatedSource:
    """A checkpoint whose tables are behind a gate."""

    def __init__(self, source: CheckpointSource, gate: Gate) -> None:
        self._source, self._gate = source, gate

    def __contains__(self, name: object) -> bool:
        return name in self._source

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._source.take(name, shape)

    def take_rows(self, name: str, shape: tuple[int, ...]) -> RowTable:
        """`layers.L.engram.embed.weight`: values of a byte, and a scale for 32 of them."""
        columns = shape[1]
        layer = int(name.split(".")[1])
        return GatedTable(self._source.take_rows(name, shape), layer, columns + columns // 32, self._gate)

    def check_all_taken(self) -> None:
        self._source.check_all_taken()


def main(arguments: Sequence[str]) -> int:
    """Measure, print, and return 1 where looking ahead took longer."""
    if arguments[:1] == ["--inside"]:
        return _inside(*arguments[1:])
    options = common.parse("engram_lookup", __doc__, arguments)
    surroundings = common.Surroundings(("torch", "numpy", "safetensors"))
    size = QUICK if options.quick else FULL
    with tempfile.TemporaryDirectory(prefix="engram_lookup.", dir=Path.cwd()) as folder:
        model = Path(folder) / "model"
        table_bytes = write_folder(model, config_json(replace(ModelSize(), **_tables(size))))
        common.progress(f"tables of {table_bytes:,} bytes")
        drop_pages(model)  # what was written is in memory that counts as this process's
        with memory_group(size.limit_bytes) as group:
            times = measure_inside(model, group, size.pairs)
    limit: Limit = "pages dropped" if group is None else "cgroup"
    steps = {rows: summary(*of) for rows, of in times.items()}
    found = steps[JUDGED]
    verdict = Verdict(
        name="engram_lookup",
        unit=f"ms a step of {JUDGED} rows, looking ahead",
        value=found["ahead_ms"],
        peer="looking up at the layer",
        peer_value=found["at_layer_ms"],
        target=TARGET,
        at_most=found["ratio_at_most"],
    )
    detail = {
        "size": asdict(size),
        "limit": limit,
        "memory_bytes": size.limit_bytes if group else None,
        "table_bytes": table_bytes,
        "steps": steps,
    }
    return common.finish(common.report(verdict, surroundings, detail), options)


def _tables(size: Size) -> dict[str, int]:
    """Of a model whose other weights leave room for pages."""
    return {"engram_rows_a_head": size.rows_a_head, "experts": 8}


Times = tuple[list[StepTime], list[StepTime]]  # ahead, at the layer; pair by pair


def measure_inside(model: Path, group: Path | None, pairs: int) -> dict[str, Times]:
    """In a process of its own, that joins the group before it allocates anything. Blocks.

    Times by rows a step.
    """
    join = 'test -z "$0" || echo $$ > "$0/cgroup.procs"; exec "$@"'
    inside = [sys.executable, "-m", "bench.engram_lookup", "--inside", str(model), str(pairs)]
    command = ["sh", "-c", join, str(group or ""), *inside, "" if group else "drop"]
    done = subprocess.run(command, cwd=_ROOT, stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        ended = f"ended with code {done.returncode}"
        raise SystemExit(f"engram_lookup: the process that measures {ended}; 137 and -9: too little memory")
    return msgspec.json.decode(done.stdout, type=dict[str, Times])


def _inside(folder: str, pairs: str, drop: str) -> int:
    """The process that measures: the times of all steps as JSON."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    with lookup_steps(Path(folder), drop=bool(drop)) as steps:
        times = {name: measure(steps, *shape, int(pairs)) for name, shape in STEPS.items()}
    sys.stdout.buffer.write(msgspec.json.encode(times))
    return 0


class Steps:
    """Steps on new ids, of sequences that go on; and their times."""

    def __init__(self, model: DeepseekModel, gate: Gate, drop: Path | None) -> None:
        self._model, self._gate, self._drop = model, gate, drop
        self._noise = torch.Generator().manual_seed(7)

    def begin(self, sequences: int, positions: int) -> None:
        """Empty sequences with room for so many positions each."""
        self._blocks, self._position = -(-positions // BLOCK), 0
        self._cache = self._model.new_cache(sequences * self._blocks, BLOCK, sequences)

    def run(self, sequences: int, count: int, *, at_layer: bool) -> StepTime:
        vocabulary = self._model.config.vocab_size
        ids = torch.randint(3, vocabulary, (sequences * count,), generator=self._noise)
        if self._drop is not None:
            drop_pages(self._drop)
        self._gate.begin(at_layer=at_layer)
        before, start_s = _read_bytes(), time.perf_counter()
        self._model.forward(ids, [self._rows(s, count) for s in range(sequences)], self._cache, self._gate)
        step_s, read = time.perf_counter() - start_s, _read_bytes() - before
        self._position += count
        return StepTime(step_s * 1e3, self._gate.reading_s * 1e3, self._gate.asked_bytes, read)

    def _rows(self, slot: int, count: int) -> SequenceRows:
        blocks = range(slot * self._blocks, (slot + 1) * self._blocks)
        return SequenceRows(slot, blocks, self._position, count)


@contextmanager
def lookup_steps(folder: Path, *, drop: bool) -> Generator[Steps]:
    """The folder's model behind a gate; `drop`: its pages before each step."""
    gate, source = Gate(), open_checkpoint(folder)
    config = source.family.config
    assert isinstance(config, DeepseekConfig)
    operations = select_operations(torch.get_num_threads())
    model = DeepseekModel(config, GatedSource(source, gate), operations, compressed_ids(config))
    try:
        yield Steps(model, gate, folder if drop else None)
    finally:
        model.close()


def measure(steps: Steps, sequences: int, count: int, pairs: int) -> Times:
    """Pairs in changing order, behind one that warms up."""
    steps.begin(sequences, 2 * count * (pairs + 1))
    times: Times = ([], [])
    for number in range(pairs + 1):
        order = (False, True) if number % 2 == 0 else (True, False)
        for at_layer in order:
            step = steps.run(sequences, count, at_layer=at_layer)
            if number:
                times[at_layer].append(step)
    return times


def summary(ahead: Sequence[StepTime], at_layer: Sequence[StepTime]) -> dict[str, float]:
    """Medians over the pairs; bytes a step are means, as reading goes in bursts."""
    ratios = [a.step_ms / b.step_ms for a, b in zip(ahead, at_layer, strict=True)]
    hidden_ms = median(b.step_ms - a.step_ms for a, b in zip(ahead, at_layer, strict=True))
    reading_ms = median(each.reading_ms for each in at_layer)
    steps = (*ahead, *at_layer)
    return {
        "ahead_ms": median(each.step_ms for each in ahead),
        "at_layer_ms": median(each.step_ms for each in at_layer),
        "ratio_at_most": median_at_most(ratios),
        "hidden_ms": hidden_ms,
        "lookup_ms": reading_ms,
        "hidden_share": hidden_ms / reading_ms,
        "asked_bytes": sum(each.asked_bytes for each in steps) / len(steps),
        "read_bytes": sum(each.read_bytes for each in steps) / len(steps),
    }


def median_at_most(values: Sequence[float], chance: float = CHANCE) -> float:
    """What the median of that from which the values are drawn exceeds with at most that chance: one of them.

    A median above the k-th smallest has k values or more below it, as a coin has k heads or more of so many
    throws. Infinite where the values are too few to say. No shape of the errors is assumed.
    """
    count = len(values)
    for k in range(1, count + 1):
        luck = sum(comb(count, heads) for heads in range(k, count + 1)) / 2**count
        if luck <= chance:
            return sorted(values)[k - 1]
    return inf


def _read_bytes() -> int:
    """That this process has had fetched from disks."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


if __name__ == "__main__":
    common.run(main)
