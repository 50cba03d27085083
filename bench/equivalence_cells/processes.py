"""Cells that take more than one process or set of weights: killed and resumed, and other weights."""

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.equivalence_cells.paths import HOST, Cell
from bench.equivalence_cells.prompts import Case
from bench.equivalence_cells.subject import GREEDY, WARM, Answer, Answers, Found, Subject, collect
from engine import Request
from engine.checkpoint.folder import WEIGHTS
from engine.model.registry import load_model
from engine.model_path import model_path

_LEAST = 3  # tokens of every case that are out when the process is killed


def killed_and_resumed(subject: Subject) -> Found:
    """A process that serves all prompts is killed; another engine goes on behind the tokens that were out."""
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder) / "given.json"
        given.write_text(json.dumps({
            "model": subject.name, "replay": subject.replay, "kv_cache_bytes": subject.kv_cache_bytes,
            "cases": [[case.name, case.prompt_ids] for case in subject.cases],
        }))  # fmt: skip
        answers = _until_killed(given, subject.cases)
    begun = {name: len(answer.token_ids) for name, answer in answers.items()}
    engine = subject.engine()
    for case in subject.cases:
        done = tuple(answers[case.name].token_ids)
        if len(done) < GREEDY.max_tokens:
            engine.add(Request(case.name, case.prompt_ids, GREEDY, cache_salt=case.name, generated_ids=done))
    for name, answer in collect([engine]).items():
        answers[name].token_ids += answer.token_ids
        answers[name].logprobs += answer.logprobs
    resumed = sum(0 < count < GREEDY.max_tokens for count in begun.values())
    return Found(answers, {"resumed": resumed}, resumed > 0)


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
    with tempfile.TemporaryDirectory() as folder:
        other = _changed(model_path(subject.name), Path(folder) / "other")
        model = load_model(str(other), threads=subject.threads, replay=subject.replay)
        try:
            changed = Subject(
                str(other), model, subject.replay, subject.cases, subject.threads, subject.kv_cache_bytes
            )
            expected = changed.plain()
            engine = subject.engine(tiers=HOST)
            subject.answer([engine], subject.cases, WARM)
            engine.update_weights("2", str(other))
            answers = subject.answer([engine], subject.cases)
            counts = engine.statistics()
            engine.close()
        finally:
            model.close()
    differing = sum(answers[name].logprobs != plain.logprobs for name, plain in subject.plain().items())
    loaded = counts.scheduler.loaded_blocks
    proof = {"loaded_blocks": loaded, "differing_from_old": differing}
    return Found(answers, proof, loaded == 0 and differing == len(answers), expected)


def _changed(source: Path, target: Path) -> Path:
    """A copy of a model's folder in which the first layer's norm weighs otherwise."""
    shutil.copytree(source, target)
    data = bytearray((target / WEIGHTS).read_bytes())
    length = int.from_bytes(data[:8], "little")
    start, stop = json.loads(data[8 : 8 + length])["layers.0.attn_norm.weight"]["data_offsets"]
    for index in range(8 + length + start, 8 + length + stop, 2):
        data[index] ^= 0x40  # of a bfloat16's fraction
    (target / WEIGHTS).write_bytes(data)
    return target


PROCESS_CELLS = (
    Cell("killed and resumed", killed_and_resumed),
    Cell("weights changed", weights_changed, lambda subject: model_path(subject.name).is_dir()),
)
