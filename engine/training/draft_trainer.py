"""The drafts' training loop: the backbone speaks, frozen and in its released form, and the drafts listen."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.training import saved
from engine.training.draft import Anchors, DraftLoss, DraftPass, draft_loss, initial_drafts, spread_anchors
from engine.training.network import Mode
from engine.training.optimiser import Optimiser, Rates
from engine.training.packing import Ids, Windows
from engine.training.parameters import Parameters
from engine.training.ranks import Ranks
from engine.training.trainer import Task, begun, clip, gradients_of

CHECKPOINT = "drafts.safetensors"
_ANCHORS = 32  # of a sequence


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """Steps of `size` sequences a rank."""

    steps: int = 500
    size: int = 4
    length: int = 512
    muon_rate: float = 0.02
    adam_rate: float = 3e-3

    def rates(self, step: int) -> Rates:
        """A short rise, then a straight fall."""
        factor = min(1.0, (step + 1) / (0.03 * self.steps), 1.5 * (1.0 - step / self.steps) + 0.01)
        return Rates(self.muon_rate * factor, self.adam_rate * factor)


@dataclass(frozen=True, slots=True)
class DraftProgress:
    """Steps done; what a step does follows from its number."""

    steps: int = 0


class DraftTrainer:
    """Owns the drafts. `backbone` stays as it is."""

    def __init__(
        self,
        task: Task,
        backbone: Parameters,
        plan: DraftPlan,
        ranks: Ranks,
        seed: int = 1,
    ) -> None:
        self.task, self.backbone, self.plan, self.ranks = task, backbone, plan, ranks
        self.drafts = initial_drafts(task.network.config, seed)
        self.progress = DraftProgress()
        self._optimiser = Optimiser(self.drafts)
        for name, tensor in self.drafts.items():
            tensor.requires_grad_(not name.endswith(("gate.bias", "gate.bias_vl")))

    def run(
        self, tokens: Ids, until: Callable[[], bool], log: Callable[[DraftProgress, DraftLoss], None]
    ) -> None:
        """Train the plan's steps, or until `until` says stop on any rank."""
        windows = Windows(tokens, self.plan.length)
        a_step = self.plan.size * self.ranks.size
        while self.progress.steps < self.plan.steps:
            noise = np.random.default_rng(self.progress.steps)
            starts = noise.integers(0, len(windows.tokens) - self.plan.length - 1, a_step)
            own = starts[self.ranks.rank :: self.ranks.size]
            loss = self._step(np.stack([windows.tokens[at : at + self.plan.length] for at in own]))
            steps = self.progress.steps + 1
            self.progress = DraftProgress(steps)
            log(self.progress, loss)
            if self.ranks.agreed(until()):
                return

    def _step(self, ids: Ids) -> DraftLoss:
        noise = torch.Generator().manual_seed(self.progress.steps * self.ranks.size + self.ranks.rank)
        anchors, deciding = spread_anchors(
            torch.tensor(ids, dtype=torch.int64), _ANCHORS, self.task.network.config.dspark_block_size, noise
        )
        wanted, streams = self.listen(ids, deciding)
        loss, one = self.draft(anchors, wanted, streams)
        learning = {name: tensor for name, tensor in self.drafts.items() if tensor.requires_grad}
        gradients = gradients_of(loss.total, learning)
        self.ranks.mean(gradients)
        self.ranks.mean(one.balance.loads)
        with torch.no_grad():
            clip(gradients, 1.0)
            self._optimiser.step(self.drafts, gradients, self.plan.rates(self.progress.steps))
            for at, load in one.balance.loads.items():
                self.drafts[f"{at}ffn.gate.bias"] += 1e-3 * torch.sign(load.mean() - load)
        return loss

    @torch.no_grad()
    def listen(self, ids: Ids, deciding_BAR: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        """The backbone's logits where rows are decided, [B, A, R, V], and the streams that drafts read."""
        mode = Mode(self.task.rounding, sparse=True)
        hidden, found = self.task.network.forward(self.backbone, self.task.batches(ids), mode)
        picked = deciding_BAR.flatten(1).unsqueeze(2).expand(-1, -1, hidden.shape[-1])
        logits = hidden.gather(1, picked) @ self.backbone["head.weight"].T
        return logits.view(*deciding_BAR.shape, -1), found.streams

    def draft(
        self, anchors: Anchors, wanted: Tensor, streams: dict[int, Tensor]
    ) -> tuple[DraftLoss, DraftPass]:
        one = DraftPass(self.task.network, self.backbone | self.drafts, self.task.rounding, streams)
        return draft_loss(one.run(anchors), wanted, one.balance), one

    def save(self, folder: Path) -> None:
        """A checkpoint that `resume` continues bit for bit."""
        file = folder / CHECKPOINT
        saved.save(
            file, self.drafts, self._optimiser, asdict(self.progress), begun(self.plan, self.ranks.size)
        )

    def resume(self, folder: Path) -> bool:
        """False where there is no checkpoint. Raises InvalidInput for one of another plan."""
        progress = saved.load(
            folder / CHECKPOINT, self.drafts, self._optimiser, begun(self.plan, self.ranks.size)
        )
        if progress is not None:
            self.progress = DraftProgress(**progress)
        return progress is not None
