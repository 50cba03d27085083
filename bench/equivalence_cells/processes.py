"""Cells that take more than one process or set of weights: killed and resumed, and other weights."""

import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.equivalence_cells.paths import Cell
from bench.equivalence_cells.prompts import BLOCK, Case
from bench.equivalence_cells.subject import (
    GREEDY,
    HOST,
    WARM,
    Answer,
    Answers,
    Found,
    Proof,
    Subject,
    collect,
    rows_of,
)
from engine import Request
from engine.model_path import model_path

_LEAST = 3  # tokens of every case that are out when the process is killed


def killed_and_resumed(subject: Subject) -> Found:
    """A process that serves all prompts at once is killed in the middle of every answer; another engine goes
    on behind the tokens that were out, whose rows it computes once."""
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder) / "given.json"
        given.write_text(json.dumps({
            "model": subject.name, "replay": subject.replay, "kv_cache_bytes": subject.room_for_all(),
            "cases": [[case.name, case.prompt_ids] for case in subject.cases],
        }))  # fmt: skip
        answers = _until_killed(given, subject.cases)
    begun = {name: len(answer.token_ids) for name, answer in answers.items()}
    engine = subject.engine(kv_cache_bytes=subject.room_for_all())
    for case in subject.cases:
        done = tuple(answers[case.name].token_ids)
        if len(done) < GREEDY.max_tokens:
            engine.add(Request(case.name, case.prompt_ids, GREEDY, cache_salt=case.name, generated_ids=done))
    resumed = 0
    for name, answer in collect([engine]).items():
        resumed += 0 < answer.first == begun[name]
        answers[name].token_ids += answer.token_ids
        answers[name].logprobs += answer.logprobs
    rows, least = engine.statistics().rows, sum(map(rows_of, subject.cases))
    taken = {"resumed_prompts": (resumed, len(subject.cases)), "rows": (rows, least)}
    return Found(answers, Proof(taken, {"further_rows": rows - least}))


def _until_killed(given: Path, cases: list[Case]) -> Answers:
    """The tokens that came out of a process before SIGKILL."""
    answers: Answers = {case.name: Answer() for case in cases}
    command = [sys.executable, "-m", "bench.equivalence_cells.worker", str(given)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        for line in worker.stdout:
            if not line.endswith("\n"):
                break
            name, token, logprob = json.loads(line)
            answers[name].token_ids.append(token)
            answers[name].logprobs.append(logprob)
            if min(len(answer.token_ids) for answer in answers.values()) >= _LEAST:
                worker.send_signal(signal.SIGKILL)
                break
        worker.stdout.close()
        worker.wait()
    return answers


def weights_changed(subject: Subject) -> Found:
    """Other weights of the same shape come between two rounds: nothing of the first is used in the second."""
    changed = subject.changed()
    engine = subject.engine(tiers=HOST)
    subject.answer([engine], subject.cases, WARM)
    kept, blocks = engine.statistics().tiers.blocks.entries, sum(c.num_known // BLOCK for c in subject.cases)
    engine.update_weights("2", changed.name)
    answers = subject.answer([engine], subject.cases)
    counts = engine.statistics()
    engine.close()
    as_before = [subject.compare(name, answer, ()) for name, answer in answers.items()]
    differing = sum(not same for _, same in as_before)
    taken = {"differing_from_old": (differing, len(subject.cases)), "blocks_of_the_old": (kept, blocks)}
    cached = sum(answer.num_cached for answer in answers.values())
    absent = {"loaded_blocks": counts.scheduler.loaded_blocks, "cached": cached}
    return Found(answers, Proof(taken, absent), judge=changed)


PROCESS_CELLS = (
    Cell("killed and resumed", killed_and_resumed),
    Cell("weights changed", weights_changed, lambda subject: model_path(subject.name).is_dir()),
)
