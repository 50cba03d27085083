"""Train nano from nothing, or go on where a training stopped.

`python -m engine.training.nano --work DIR [--minutes 110] [--tokens 16000000] [--ranks 2]`. Everything is in
the folder: text, vocabulary, tokens, `training.safetensors` (the checkpoint, every ten minutes and at the
end) and `log.jsonl`. Ctrl-C, SIGTERM or the end of the minutes leave a checkpoint that the same command goes
on from; the weights come out the same as without the stop.
"""

import argparse
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from engine.training.judging import judge, windows_of
from engine.training.losses import Loss
from engine.training.network import Mode
from engine.training.parameters import initial_parameters
from engine.training.ranks import Ranks, join, leave
from engine.training.trainer import CHECKPOINT, Plan, Progress, Trainer
from engine.training.workplace import Workplace, open_workplace

SEED = 20_26
_SAVE_S, _JUDGE_S, _SAY_S = 600.0, 900.0, 20.0
_JUDGED = 32  # windows, while it trains


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    if options.rank is not None:
        return _rank(options)
    place = open_workplace(options.work)
    counts = ", ".join(f"{name} {place.about[name]['tokens']:,} tokens" for name in ("training", "held_out"))
    print(f"{place.folder}: {counts}", flush=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "engine.training.nano", *arguments, "--address", address]
    ranks = [
        subprocess.Popen([*command, "--rank", str(rank)], env=environment) for rank in range(options.ranks)
    ]
    return _wait(ranks)


def _wait(ranks: list[subprocess.Popen[bytes]]) -> int:
    """Ends all when one fails; passes a request to stop on, which they answer with a checkpoint."""

    def stop(number: int, _: object) -> None:
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    while any(rank.poll() is None for rank in ranks):
        if any(rank.returncode for rank in ranks):
            for rank in ranks:
                rank.kill()
        time.sleep(0.2)
    return max(abs(rank.wait()) for rank in ranks)


def _rank(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent passes it on
    ranks = join(options.rank, options.ranks, options.address)
    try:
        place = open_workplace(options.work)
        plan = Plan(tokens=options.tokens, batch_tokens=options.batch_tokens)
        task = place.task(plan)
        trainer = Trainer(task, initial_parameters(task.network.config, SEED), plan, ranks)
        if trainer.resume(place.folder):
            _say(ranks, f"going on after {trainer.progress.seen:,} tokens")
        watch = Watch(place, trainer, ranks, options.minutes)
        trainer.run(place.tokens, watch.is_over, watch.log)
        watch.save()
    finally:
        leave(ranks)
    return 0


class Watch:
    """The clock of a training: when it says something, saves, and stops."""

    def __init__(self, place: Workplace, trainer: Trainer, ranks: Ranks, minutes: float) -> None:
        self._place, self._trainer, self._ranks = place, trainer, ranks
        now = time.monotonic()
        self._end_s = now + minutes * 60.0
        self._saved_s = self._said_s = now
        self._judged_s = now - _JUDGE_S
        self._stopped = False
        self._windows = windows_of(place.tokenizer, place.held_out, trainer.plan.long_length)
        self._windows = self._windows[:: max(len(self._windows) // _JUDGED, 1)]
        signal.signal(signal.SIGTERM, self._stop)

    def _stop(self, number: int, _: object) -> None:
        self._stopped = True

    def is_over(self) -> bool:
        return self._stopped or time.monotonic() > self._end_s

    def log(self, progress: Progress, loss: Loss) -> None:
        """After each step. Only the first rank writes."""
        if self._ranks.rank != 0:
            return
        now = time.monotonic()
        if now - self._said_s > _SAY_S:
            self._said_s = now
            self._write(
                {"seen": progress.seen, "nats": loss.nats, "index": loss.index, "seconds": progress.seconds}
            )
        if now - self._saved_s > _SAVE_S:
            self.save()
        if now - self._judged_s > _JUDGE_S:
            self._judged_s = now
            self._write({"seen": progress.seen, "held_out_bits_per_byte": self._judge()})

    def save(self) -> None:
        if self._ranks.rank == 0:
            self._saved_s = time.monotonic()
            self._trainer.save(self._place.folder)
            _say(self._ranks, f"saved {self._place.folder / CHECKPOINT}")

    def _judge(self) -> float:
        task = self._trainer.task
        late = self._trainer.plan.is_last_part(self._trainer.progress.seen)
        mode = Mode(task.rounding, sparse=True) if late else Mode()
        return judge(task.network, self._trainer.parameters, task.batches, self._windows, mode).bits_per_byte

    def _write(self, said: dict[str, float]) -> None:
        known = {name: round(value, 4) for name, value in said.items() if not math.isnan(value)}
        with (self._place.folder / "log.jsonl").open("a") as log:
            log.write(json.dumps(known) + "\n")
        _say(self._ranks, " ".join(f"{name} {value:,}" for name, value in known.items()))


def _say(ranks: Ranks, text: str) -> None:
    if ranks.rank == 0:
        print(text, flush=True)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m engine.training.nano", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--work", type=Path, required=True, help="the training's folder")
    parser.add_argument("--minutes", type=float, default=110.0, help="stop after so many, with a checkpoint")
    parser.add_argument(
        "--tokens", type=int, default=16_000_000, help="in all; the same in every continuation"
    )
    parser.add_argument("--batch-tokens", type=int, default=4_096, help="of one process and step")
    parser.add_argument("--ranks", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", default="", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
