"""Train nano from nothing, or go on where a training stopped.

`python -m engine.training.nano --work DIR [--minutes 110] [--tokens 6000000] [--batch-tokens 4096]
[--draft-steps 500] [--ranks 2] [--plain]`. Everything is in the folder: text, vocabulary, tokens,
`training.safetensors` (the checkpoint, every ten minutes and at the end) and `log.jsonl`. Ctrl-C, SIGTERM or
the end of the minutes leave a checkpoint that the same command goes on from; the weights come out the same as
without the stop. When all tokens are seen, the drafts are trained beside the frozen backbone, and `released/`
is the checkpoint in the release's own form. A stop is obeyed behind the step that is under way.
"""

import argparse
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from engine.training.draft import DraftLoss
from engine.training.draft_trainer import CHECKPOINT as DRAFTS
from engine.training.draft_trainer import DraftPlan, DraftProgress, DraftTrainer
from engine.training.fast import use_fast
from engine.training.judging import AT_ONCE, Judgement, Window, in_groups, judge, windows_of
from engine.training.losses import Loss
from engine.training.network import Mode
from engine.training.options import at_least, duration
from engine.training.parameters import initial_parameters
from engine.training.ranks import Ranks, join, leave
from engine.training.release import write_release
from engine.training.saved import check_plan
from engine.training.trainer import CHECKPOINT, Plan, Progress, Task, Trainer, begun, check_room
from engine.training.workplace import Workplace, open_workplace
from protocol.errors import InvalidInput

SEED = 20_26
_SAVE_S, _JUDGE_S, _SAY_S = 600.0, 900.0, 20.0
BEFORE_LAST_PART = "before_last_part"
_JUDGED = 32  # windows, while it trains


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    if options.rank is not None:
        return _rank(options)
    try:
        place = open_workplace(options.work)
        counts = ", ".join(
            f"{name} {place.about[name]['tokens']:,} tokens" for name in ("training", "held_out")
        )
        print(f"{place.folder}: {counts}", flush=True)
        _check(place, options)
    except InvalidInput as error:
        print(error, file=sys.stderr)
        return error.exit_code
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "engine.training.nano", *arguments, "--address", address]
    ranks = [
        subprocess.Popen([*command, "--rank", str(rank)], env=environment) for rank in range(options.ranks)
    ]
    return _wait(ranks)


def _check(place: Workplace, options: argparse.Namespace) -> None:
    """What every rank would refuse, said once. Raises InvalidInput."""
    plan, drafts = _plans(options)
    check_room(plan, options.ranks, place.tokens)
    check_plan(place.folder / CHECKPOINT, begun(plan, options.ranks))
    check_plan(place.folder / DRAFTS, begun(drafts, options.ranks))


def _plans(options: argparse.Namespace) -> tuple[Plan, DraftPlan]:
    plan = Plan(tokens=options.tokens, batch_tokens=options.batch_tokens)
    return plan, DraftPlan(steps=options.draft_steps)


def _wait(ranks: list[subprocess.Popen[bytes]]) -> int:
    """Ends all when one fails; passes a request to stop on, which they answer with a checkpoint."""

    asked = False

    def stop(number: int, _: object) -> None:
        nonlocal asked
        if not asked:
            print("stopping behind this step", flush=True)
        asked = True
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    while any(rank.poll() is None for rank in ranks):
        failed = [rank.returncode for rank in ranks if rank.returncode]
        if failed:
            for rank in ranks:
                rank.kill()
                rank.wait()
            return abs(failed[0])
        time.sleep(0.2)
    return max(abs(rank.wait()) for rank in ranks)


def _rank(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    fast = not options.plain and use_fast()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent passes it on
    ranks = join(options.rank, options.ranks, options.address)
    watch = Watch(options.work, ranks, options.minutes)
    try:
        place = open_workplace(options.work)
        plan, draft_plan = _plans(options)
        if fast:
            watch.say("compiling before the first steps: a few minutes")
        trainer = _train(place, plan, watch)
        if trainer.progress.seen >= plan.tokens:
            drafts = _train_drafts(place, trainer, draft_plan, watch)
            if drafts.progress.steps >= drafts.plan.steps and ranks.rank == 0:
                _release(place, trainer, drafts)
    finally:
        leave(ranks)
    return 0


def _train(place: Workplace, plan: Plan, watch: "Watch") -> Trainer:
    task = place.task(plan)
    trainer = Trainer(task, initial_parameters(task.network.config, SEED), plan, watch.ranks)
    if trainer.resume(place.folder):
        watch.say(f"going on after {trainer.progress.seen:,} tokens")
    windows = windows_of(place.tokenizer, place.held_out, plan.long_length)
    windows = windows[:: max(len(windows) // _JUDGED, 1)]

    def log(progress: Progress, loss: Loss) -> None:
        watch.report(
            {"seen": progress.seen, "nats": loss.nats, "index": loss.index, "seconds": progress.seconds}
        )
        watch.save(lambda: trainer.save(place.folder))
        if plan.is_last_part(progress.seen) and watch.ranks.rank == 0:
            keep_before_last_part(trainer, place.folder)
        watch.judge(held_out)

    def held_out() -> Mapping[str, float]:
        late = plan.is_last_part(trainer.progress.seen)
        mode = Mode(task.rounding, sparse=True) if late else Mode()
        found = _judged(task, trainer, windows, mode, watch.is_over)
        if found is None:
            return {}
        return {"seen": trainer.progress.seen, "held_out_bits_per_byte": found.bits_per_byte}

    if trainer.progress.seen < plan.tokens:
        trainer.run(place.tokens, watch.is_over, log)
        watch.save(lambda: trainer.save(place.folder), now=True)
    return trainer


def _judged(
    task: Task, trainer: Trainer, windows: Sequence[Window], mode: Mode, until: Callable[[], bool]
) -> Judgement | None:
    """None where `until` says stop on the way: all the windows take minutes."""
    parts: list[Judgement] = []
    for group in in_groups(windows, AT_ONCE):
        if until():
            return None
        parts.append(judge(task.network, trainer.parameters, task.batches, group, mode))
    return Judgement(
        tuple(nats for part in parts for nats in part.nats),
        tuple(count for part in parts for count in part.num_bytes),
    )


def keep_before_last_part(trainer: Trainer, folder: Path) -> None:
    """The checkpoint that has not learnt to bear rounding: what rounding costs is judged on it."""
    before = folder / BEFORE_LAST_PART
    if not before.exists():
        before.mkdir()
        trainer.save(before)


def _train_drafts(place: Workplace, trainer: Trainer, plan: DraftPlan, watch: "Watch") -> DraftTrainer:
    backbone = {name: tensor.detach() for name, tensor in trainer.parameters.items()}
    drafts = DraftTrainer(trainer.task, backbone, plan, watch.ranks)
    if drafts.resume(place.folder):
        watch.say(f"going on after {drafts.progress.steps:,} steps of the drafts")

    def log(progress: DraftProgress, loss: DraftLoss) -> None:
        first = {f"accepted_{row}": share for row, share in enumerate(loss.accepted)}
        watch.report({"draft_steps": progress.steps, "draft_nats": float(loss.total.detach()), **first})
        watch.save(lambda: drafts.save(place.folder))

    if drafts.progress.steps < drafts.plan.steps:
        drafts.run(place.tokens, watch.is_over, log)
        watch.save(lambda: drafts.save(place.folder), now=True)
    return drafts


def _release(place: Workplace, trainer: Trainer, drafts: DraftTrainer) -> None:
    target = place.folder / "released"
    shutil.rmtree(target, ignore_errors=True)
    written = write_release(place, trainer.parameters | drafts.drafts, target)
    print(f"released {target}: {written.num_tensors:,} tensors, {written.num_bytes:,} bytes", flush=True)


class Watch:
    """The clock of a training: when it says something, saves, judges and stops. Only the first rank acts."""

    def __init__(self, folder: Path, ranks: Ranks, minutes: float) -> None:
        self.ranks, self._log = ranks, folder / "log.jsonl"
        now = time.monotonic()
        self._end_s = now + minutes * 60.0
        self._due_s = {"report": now, "save": now + _SAVE_S, "judge": now}
        self._stopped = False
        signal.signal(signal.SIGTERM, self._stop)

    def _stop(self, number: int, _: object) -> None:
        self._stopped = True

    def is_over(self) -> bool:
        return self._stopped or time.monotonic() > self._end_s

    def report(self, said: Mapping[str, float]) -> None:
        if self._is_due("report", _SAY_S):
            self._write(said)

    def judge(self, judge: Callable[[], Mapping[str, float]]) -> None:
        """Not where a stop was asked for, which waits for nothing but its checkpoint."""
        if not self.is_over() and self._is_due("judge", _JUDGE_S) and (said := judge()):
            self._write(said)

    def save(self, save: Callable[[], None], now: bool = False) -> None:
        if self._is_due("save", _SAVE_S) or (now and self.ranks.rank == 0):
            save()
            self.say("saved")

    def say(self, text: str) -> None:
        if self.ranks.rank == 0:
            print(text, flush=True)

    def _is_due(self, what: str, every_s: float) -> bool:
        if self.ranks.rank != 0 or time.monotonic() < self._due_s[what]:
            return False
        self._due_s[what] = time.monotonic() + every_s
        return True

    def _write(self, said: Mapping[str, float]) -> None:
        known = {name: round(value, 4) for name, value in said.items() if not math.isnan(value)}
        with self._log.open("a") as log:
            log.write(json.dumps(known) + "\n")
        self.say(" ".join(f"{name} {value:,}" for name, value in known.items()))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m engine.training.nano", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--work", type=Path, required=True, help="the training's folder")
    parser.add_argument("--minutes", type=duration, default=110.0, help="then stop, with a checkpoint")
    parser.add_argument(
        "--tokens", type=at_least(1), default=6_000_000, help="in all; the same in every continuation"
    )
    parser.add_argument("--batch-tokens", type=at_least(1), default=4_096, help="of one process and step")
    parser.add_argument(
        "--draft-steps", type=at_least(1), default=DraftPlan().steps, help="behind the backbone's"
    )
    parser.add_argument("--plain", action="store_true", help="no compiled loops, no products of bfloat16")
    parser.add_argument("--ranks", type=at_least(1), default=2, help="processes of one thread each")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", default="", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
