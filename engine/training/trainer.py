"""One rank's training loop: batches to gradients to steps, resumable at every checkpoint."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from engine.training import saved
from engine.training.batches import BatchMaker
from engine.training.losses import Loss, loss_of
from engine.training.network import Mode, Network
from engine.training.optimiser import Optimiser, Rates
from engine.training.packing import Ids, Windows
from engine.training.parameters import Parameters
from engine.training.ranks import Ranks
from engine.training.sublayers import Rounding
from protocol.errors import InvalidInput

_LEARNS_INDEX_OF = 4  # steps: the indexer costs as much as the attention that it imitates
CHECKPOINT = "training.safetensors"


@dataclass(frozen=True, slots=True)
class Plan:
    """How long to train, and how. Lengths in tokens of all ranks together."""

    tokens: int
    batch_tokens: int  # of one rank and step
    length: int = 512  # of a sequence
    long_length: int = 1024  # in the last part
    last_part: float = 0.2  # of the tokens: chosen groups, rounded caches and experts, replayed windows
    muon_rate: float = 0.02
    adam_rate: float = 3e-3
    warm_up: float = 0.02
    decay: float = 0.5  # of the tokens, from the end: the rate falls linearly to nothing
    bias_step: float = 1e-3  # of the router's bias

    def rates(self, seen: int) -> Rates:
        """After `seen` tokens."""
        done = seen / self.tokens
        factor = min(1.0, (done + 1e-4) / self.warm_up, max(1.0 - done, 0.0) / self.decay + 0.01)
        return Rates(self.muon_rate * factor, self.adam_rate * factor)

    def is_last_part(self, seen: int) -> bool:
        return seen >= (1.0 - self.last_part) * self.tokens


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a training stands; with the tensors, all that a resumed one needs."""

    seen: int = 0  # tokens of all ranks
    steps: int = 0
    epoch: int = 0
    batch: int = 0  # of the epoch
    length: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Task:
    """What is learned: the network, how its inputs are made, and the rounding of the last part."""

    network: Network
    batches: BatchMaker
    rounding: Rounding


class Trainer:
    """Owns parameters and optimiser. All ranks hold the same values, bit for bit."""

    def __init__(
        self,
        task: "Task",
        parameters: Parameters,
        plan: Plan,
        ranks: Ranks = Ranks(),  # noqa: B008 - frozen
    ) -> None:
        self.task, self.parameters, self.plan, self.ranks = task, parameters, plan, ranks
        self._optimiser = Optimiser(parameters)
        self.progress: Progress = Progress(length=plan.length)
        for name, tensor in parameters.items():
            tensor.requires_grad_(not name.endswith(("gate.bias", "gate.bias_vl")))

    def run(self, tokens: Ids, until: Callable[[], bool], log: Callable[[Progress, Loss], None]) -> None:
        """Train until the plan's tokens are seen, or `until` says stop on any rank.

        Raises InvalidInput where the text or the batch has no room for a sequence of the plan.
        """
        check_room(self.plan, self.ranks.size, tokens)
        while self.progress.seen < self.plan.tokens:
            length = self.progress.length
            for batch in self._batches(tokens):
                started = time.monotonic()
                loss = self._step(batch)
                self.progress = self._behind(batch, time.monotonic() - started)
                log(self.progress, loss)
                if self.ranks.agreed(until()) or self.progress.seen >= self.plan.tokens:
                    return
                if self.progress.length != length:
                    break
            else:
                self.progress = replace(self.progress, epoch=self.progress.epoch + 1, batch=0)

    def _behind(self, batch: Ids, seconds: float) -> Progress:
        """Where a batch leaves the training, and in what length it goes on: another is another epoch."""
        now = self.progress
        seen = now.seen + (batch.size - len(batch)) * self.ranks.size
        length = self.plan.long_length if self.plan.is_last_part(seen) else self.plan.length
        behind = replace(now, seen=seen, steps=now.steps + 1, length=length, seconds=now.seconds + seconds)
        if length != now.length:
            return replace(behind, epoch=now.epoch + 1, batch=0)
        return replace(behind, batch=now.batch + 1)

    def _batches(self, tokens: Ids) -> Iterator[Ids]:
        """The epoch's batches from where the training stands."""
        windows = Windows(tokens, self.progress.length)
        size = self.plan.batch_tokens // self.progress.length
        batches = windows.batches(size, self.progress.epoch, self.ranks.rank, self.ranks.size)
        for number, batch in enumerate(batches):
            if number >= self.progress.batch:
                yield batch

    def _step(self, windows: Ids) -> Loss:
        late = self.plan.is_last_part(self.progress.seen)
        noise = np.random.default_rng((self.progress.steps, self.ranks.rank)) if late else None
        batch = self.task.batches(windows[:, :-1], noise)
        targets = torch.tensor(windows[:, 1:], dtype=torch.int64)
        learns = late or self.progress.steps % _LEARNS_INDEX_OF == 0
        mode = Mode(self.task.rounding if late else Rounding(), sparse=late, learn_index=learns)
        loss = loss_of(self.task.network, self.parameters, batch, targets, mode)
        learning = {name: tensor for name, tensor in self.parameters.items() if tensor.requires_grad}
        gradients = gradients_of(loss.total, learning)
        self.ranks.mean(gradients)
        clip(gradients, 1.0)
        with torch.no_grad():
            self._optimiser.step(self.parameters, gradients, self.plan.rates(self.progress.seen))
            self._balance(loss.loads)
        return loss

    def _balance(self, loads: dict[str, Tensor]) -> None:
        """An expert with less than its share becomes likelier (section 13)."""
        self.ranks.mean(loads)
        for at, load in loads.items():
            self.parameters[f"{at}ffn.gate.bias"] += self.plan.bias_step * torch.sign(load.mean() - load)

    def save(self, folder: Path) -> None:
        """A checkpoint that `resume` continues bit for bit."""
        file = folder / CHECKPOINT
        saved.save(
            file, self.parameters, self._optimiser, asdict(self.progress), begun(self.plan, self.ranks.size)
        )

    def resume(self, folder: Path) -> bool:
        """False where there is no checkpoint. Raises InvalidInput for one of another plan."""
        progress = saved.load(
            folder / CHECKPOINT, self.parameters, self._optimiser, begun(self.plan, self.ranks.size)
        )
        if progress is not None:
            self.progress = Progress(**progress)
        return progress is not None


def begun(plan: object, num_ranks: int) -> dict[str, Any]:
    """What schedule and order of the data follow from: the plan's fields, and how many share its batches."""
    return asdict(cast(Any, plan)) | {"ranks": num_ranks}


def check_room(plan: Plan, num_ranks: int, tokens: Ids) -> None:
    """Raises InvalidInput: an epoch without a batch would go on for ever."""
    longest = max(plan.length, plan.long_length)
    if plan.batch_tokens < longest:
        raise InvalidInput(f"batch_tokens is {plan.batch_tokens}, expected a sequence of {longest} at least")
    least = plan.batch_tokens * num_ranks + longest + 1
    if len(tokens) < least:
        raise InvalidInput(
            f"the text has {len(tokens)} tokens, expected {least} at least: a step of all ranks"
        )


def gradients_of(total: Tensor, learning: Parameters) -> Parameters:
    """By name. What took no part in the step has none and is not stepped: the indexer, most of the time."""
    found = torch.autograd.grad(total, list(learning.values()), allow_unused=True)
    found = cast(Sequence[Tensor | None], found)  # its types know of no unused ones
    return {name: each for name, each in zip(learning, found, strict=True) if each is not None}


def clip(gradients: Parameters, limit: float) -> None:
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
    if norm > limit:
        for gradient in gradients.values():
            gradient.mul_(limit / norm)
