"""The same greedy prompts down every path of the engine: equal tokens, equal bits, and proof of the path.

Each cell answers prompts of 16 to 4,000 tokens that share their starts, and is green when every token, and
the probability of every token, is that of the plain engine (alone, in one chunk, knowing no prefix), and when
the engine's own counters show that the path was taken. Behind windows that were run again, the plain engine
resumes at the same places. Then ten faults are put into the engine; each must turn a named cell red.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from bench.common import Options, Surroundings, finish, parse, progress
from bench.equivalence_cells.faults import try_faults
from bench.equivalence_cells.matrix import ALL_CELLS, Verdict, judge
from bench.equivalence_cells.prompts import LONGEST, SHORT, cases, spread
from bench.equivalence_cells.subject import Subject
from engine.model.registry import load_model

_FULL = {"nano": 48, "smollm2": 16}  # prompts: 64 in all
_BYTES = {"nano": 16 << 20, "smollm2": 640 << 20}
_QUICK_BYTES = {"nano": 4 << 20, "smollm2": 96 << 20}


def subject_of(name: str, *, replay: bool, quick: bool) -> Subject:
    """Its owner closes the model."""
    model = load_model(name, threads=1, replay=replay)
    lengths = (SHORT if name == "nano" else SHORT[2:4]) if quick else spread(_FULL[name], LONGEST)
    found = cases(model.tokenizer(), lengths)
    return Subject(name, model, replay, found, 1, (_QUICK_BYTES if quick else _BYTES)[name])


def verdicts(subject: Subject) -> Iterator[Verdict]:
    for cell in ALL_CELLS:
        if cell.applies(subject):
            started = time.perf_counter()
            verdict = judge(cell, subject)
            colour = "green" if verdict.green else "RED"
            progress(f"{subject.matrix}: {cell.name}: {colour} ({time.perf_counter() - started:.1f} s)")
            yield verdict


def measure(options: Options) -> dict[str, Any]:
    surroundings, started = Surroundings(["torch"]), time.perf_counter()
    found: list[Verdict] = []
    for name, replay in (("nano", True), ("nano", False), ("smollm2", True)):
        subject = subject_of(name, replay=replay, quick=options.quick)
        found += verdicts(subject)
        subject.model.close()
    faults = list(try_faults())
    for fault in faults:
        progress(f"fault {fault.fault}: {fault.cell} is {'red' if fault.red else 'STILL GREEN'}")
    green, caught = sum(v.green for v in found), sum(fault.red for fault in faults)
    return {
        "name": "equivalence", "value": green, "unit": "green cells",
        "peer": "cells", "peer_value": len(found),
        "ratio": round(green / len(found), 3), "target": 1.0,
        "met": green == len(found) and caught == len(faults) == 10,
        "env": surroundings.describe(), "seconds": round(time.perf_counter() - started, 1),
        "tokens_compared": sum(v.answers for v in found) * 64, "faults_caught": caught,
        "cells": [verdict.as_json() for verdict in found], "faults": [fault.as_json() for fault in faults],
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse("equivalence", __doc__, arguments)
    return finish(measure(options), options)


if __name__ == "__main__":
    sys.exit(main())
