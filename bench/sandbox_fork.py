"""A fork of a sandbox, from the call to the end of a first program in it, beside what one does by hand.

`python -m bench.sandbox_fork --json [--quick]`. Layers in memory and on disk, on both substrates, that hold
nothing, 1,000 files of 16 KiB, or one file of 64 MiB. The peer does the same in two steps: a fresh sandbox,
and `cp -a` of the layer from one tmpfs to another. All take turns. Milliseconds, p50. The value is of a
`container` whose layer lies in memory, 1,000 files; less is better. Beside it: a create on either kind, and
how long the origin stands still for a snapshot. Those are deleted at the end: for minutes, ext4 passes over
the numbers of files that were deleted, one by one, whenever it makes another.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from subprocess import run
from typing import Literal

from bench import common
from sandbox import Sandbox
from sandbox.errors import UnsupportedError
from sandbox.layers.choice import choose
from sandbox.places import default_state_dir

TARGET = 1.1  # times the two steps by hand
TRUE = ["/usr/bin/true"]
CONTENTS = {
    "nothing": "true",
    "1000 files": "for i in $(seq 1000); do head -c 16384 /dev/urandom > $i; done",
    "64 MiB": "head -c 64M /dev/urandom > big",
}
SNAPSHOTS = 3
JUDGED = ("container", "memory", "1000 files")

Kind = Literal["memory", "disk"]


@dataclass(frozen=True, slots=True)
class Verdict(common.Comparison):
    """Less is better."""

    @property
    def met(self) -> bool:
        return self.ratio <= self.target


def main(arguments: Sequence[str]) -> int:
    options = common.parse("sandbox_fork", __doc__, arguments)
    surroundings = common.Surroundings(("pydantic",))
    rounds = 5 if options.quick else 25
    with common.temporary_home(), ExitStack() as at_the_end:
        rows = {
            (substrate, kind, content): _measure(substrate, kind, content, rounds, at_the_end)
            for substrate in ("function", "container")
            for kind in _kinds()
            for content in CONTENTS
        }
    judged = rows[JUDGED]
    verdict = Verdict(
        name="sandbox_fork",
        unit="ms to the end of /usr/bin/true",
        value=judged["fork_ms"],
        peer="a create and cp -a",
        peer_value=judged["create_ms"] + judged["cp_ms"],
        target=TARGET,
    )
    detail = {"rounds": rounds, "layers": {" ".join(name): row for name, row in rows.items()}}
    return common.finish(common.report(verdict, surroundings, detail), options)


def _kinds() -> tuple[Kind, ...]:
    try:
        choose("disk", default_state_dir())
    except UnsupportedError:
        return ("memory",)
    return ("memory", "disk")


def _measure(
    substrate: str, kind: Kind, content: str, rounds: int, at_the_end: ExitStack
) -> dict[str, float]:
    """p50 of each, in milliseconds. They take turns, first forwards, then backwards."""
    common.progress(f"{substrate} {kind}: {content}")
    with ExitStack() as ending:
        origin = ending.enter_context(Sandbox.create(substrate=substrate, layer=kind))
        origin.commands.run(CONTENTS[content], timeout_s=120)
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        layer = origin._made.launched.open_layer()  # pyright: ignore[reportPrivateUsage]
        ending.callback(os.close, layer)
        actions: Mapping[str, Callable[[], float]] = {
            "fork_ms": partial(_timed, origin.fork_fs),
            "create_ms": partial(_timed, partial(Sandbox.create, substrate=substrate, layer=kind)),
            "cp_ms": partial(_copy, Path(f"/proc/{os.getpid()}/fd/{layer}"), folder),
        }
        times: dict[str, list[float]] = {name: [] for name in actions}
        for number in range(rounds):
            for name in list(actions)[:: 1 if number % 2 == 0 else -1]:
                times[name].append(actions[name]())
        times["snapshot_ms"] = [_snapshot(origin, at_the_end) for _ in range(SNAPSHOTS)]
    return {name: round(median(each) * 1e3, 2) for name, each in times.items()}


def _timed(make: Callable[[], Sandbox]) -> float:
    start_s = time.perf_counter()
    with make() as box:
        result = box.commands.run(TRUE)
        taken_s = time.perf_counter() - start_s
        if not result.ok:
            raise SystemExit(f"sandbox_fork: the program ended with {result.reason}: {result.stderr}")
    return taken_s


def _copy(source: Path, folder: Path) -> float:
    target = folder / "copy"
    start_s = time.perf_counter()
    run(["cp", "-a", f"{source}/.", str(target)], check=True)
    taken_s = time.perf_counter() - start_s
    shutil.rmtree(target)
    return taken_s


def _snapshot(origin: Sandbox, at_the_end: ExitStack) -> float:
    start_s = time.perf_counter()
    kept = origin.snapshot()
    taken_s = time.perf_counter() - start_s
    at_the_end.callback(kept.delete)
    return taken_s


if __name__ == "__main__":
    common.run(main)
