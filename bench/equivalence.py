"""The same greedy prompts down every path of the engine: equal tokens, equal bits, and proof of the path.

Each cell answers prompts of 16 to 4,000 tokens that share their starts, and is green when every token, and
the probability of every token, is that of one forward of the model over prompt and answer, apart from the
engine, and when the engine's own counters show that the path was taken. Behind windows that were run again,
that forward follows the rule of the fact sheet at the same places. Then ten faults are put into the engine,
each of which must turn a named cell red, and each cell's path is closed while its answers stay right: its
counters must notice.

`python -m bench.equivalence --json [--quick] [--only MODEL …]`; `--only` judges the cells of these models.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

from bench.common import Options, Surroundings, finish, parse_own, progress, run
from bench.equivalence_cells.detours import Seen, try_detours
from bench.equivalence_cells.faults import Tried, try_faults
from bench.equivalence_cells.matrix import ALL_CELLS, Verdict, judge
from bench.equivalence_cells.prompts import LONGEST, SHORT, cases, spread
from bench.equivalence_cells.subject import Subject
from engine.model.registry import load_model

SUBJECTS = (("nano", True), ("nano", False), ("smollm2", True))  # and replay
_FULL = {"nano": spread(48, LONGEST), "smollm2": spread(16, LONGEST)}  # 64 prompts
_QUICK = {"nano": SHORT[4:], "smollm2": SHORT[1:3]}
_CACHED_POSITIONS = 8_192


def subject_of(name: str, lengths: tuple[int, ...], *, replay: bool) -> Subject:
    """Its owner closes it, and its model. One thread: a small model is no faster on two, and much slower
    where a neighbour has one of them."""
    model = load_model(name, threads=1, replay=replay)
    positions = max(_CACHED_POSITIONS, sum(lengths) // 2) if max(lengths) > max(SHORT) else sum(lengths) * 5
    num_bytes = int(model.cache_bytes_per_token() * positions)
    return Subject(name, model, replay, cases(model.tokenizer(), lengths), 1, max(num_bytes, 4 << 20))


def verdicts(subject: Subject) -> Iterator[Verdict]:
    for cell in ALL_CELLS:
        if cell.applies(subject):
            started = time.perf_counter()
            verdict = judge(cell, subject)
            colour = "green" if verdict.green else f"RED {verdict}"
            progress(f"{subject.matrix}: {cell.name}: {colour} ({time.perf_counter() - started:.1f} s)")
            yield verdict


def measure(options: Options, only: Sequence[str] = ()) -> dict[str, Any]:
    """`only`: names of models; all where there are none."""
    surroundings, started = Surroundings(["torch"]), time.perf_counter()
    found: list[Verdict] = []
    for name, replay in SUBJECTS:
        if only and name not in only:
            continue
        subject = subject_of(name, (_QUICK if options.quick else _FULL)[name], replay=replay)
        with closing(subject.model), closing(subject):
            found += verdicts(subject)
    faults: list[Tried] = []
    for fault in try_faults():
        progress(f"fault {fault.fault}: {fault.cell} is {'red' if fault.red else 'STILL GREEN'}")
        faults.append(fault)
    detours: list[Seen] = []
    for seen in try_detours():
        progress(f"detour {seen.detour}: {seen.cell} {'notices' if seen.noticed else 'DOES NOT NOTICE'}")
        detours.append(seen)
    green, caught = sum(v.green for v in found), sum(fault.red for fault in faults)
    noticed = sum(seen.noticed for seen in detours)
    return {
        "name": "equivalence", "value": green, "unit": "green cells",
        "peer": "cells", "peer_value": len(found),
        "ratio": round(green / len(found), 3), "target": 1.0,
        "met": green == len(found) and caught == len(faults) == 10 and noticed == len(detours),
        "env": surroundings.describe(), "seconds": round(time.perf_counter() - started, 1),
        "tokens_compared": sum(v.answers for v in found) * 64, "faults_caught": caught,
        "detours_noticed": noticed,
        "cells": [verdict.as_json() for verdict in found], "faults": [fault.as_json() for fault in faults],
        "detours": [seen.as_json() for seen in detours],
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    own = argparse.ArgumentParser(add_help=False)
    names = sorted({name for name, _ in SUBJECTS})
    own.add_argument("--only", nargs="+", default=[], choices=names, help="these models alone")
    chosen, options = parse_own("equivalence", __doc__, arguments, own)
    return finish(measure(options, chosen.only), options)


if __name__ == "__main__":
    run(main)
