"""Rows of a DeepSeek-V4 prompt in which rounding decides, beside transformers'.

A CSA layer attends to the entries of its k best index scores; a row goes to the experts of its k best scores.
Where the k-th and the next differ by less than float32 rounds, two right implementations choose differently,
and every later row sees the difference. Here transformers runs a prompt once more and takes our choice in
such rows alone, so that logits can be compared behind them; a row that differs with a clear gap keeps its own
and counts as unexplained.
Shapes: T rows, N candidates, K chosen ones, C channels, E experts.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from engine import numerics
from engine.model.deepseek.hyper_connections import Stream
from engine.model.deepseek.moe import expert_scores
from engine.model.deepseek.rows import Rows
from engine.numerics import Dense
from kernels.fused import FusedOperations, Mixture
from kernels.operations import Operations

TIE = 2e-5  # of scores, which are about 1 here: streams are apart by up to 9e-5 behind the last layers
RATIO = 4  # tokens in a CSA layer's group
_INDEX_SCORER, _ROUTER = "DeepseekV4IndexerScorer", "DeepseekV4TopKRouter"


@dataclass(slots=True)
class TieCounts:
    """Of all layers and prompts. `widest`: the largest gap of a row that was settled."""

    rows: int = 0
    settled: int = 0
    unexplained: int = 0
    widest: float = 0.0


class Choices:
    """An observer of our model that keeps what each layer selects, chunk after chunk."""

    def __init__(self) -> None:
        self._groups: dict[int, list[Tensor]] = {}
        self._experts: dict[int, list[Tensor]] = {}

    def left(self, layer: int, stream: Stream, rows: Rows) -> None: ...

    def selected(self, layer: int, groups_TK: Tensor, blocks: dict[int, Tensor], rows: Rows) -> None:
        self._groups.setdefault(layer, []).append(groups_TK.clone())

    def routed(self, mixture: Mixture, experts_TK: Tensor) -> None:
        self._experts.setdefault(id(mixture), []).append(experts_TK)

    @property
    def groups(self) -> list[Tensor]:
        """int64 [T, K] of each CSA layer in order."""
        return _joined(self._groups)

    @property
    def experts(self) -> list[Tensor]:
        """int64 [T, K] of each layer with a router in order."""
        return _joined(self._experts)


def _joined(chunks: Mapping[int, list[Tensor]]) -> list[Tensor]:
    return [torch.cat(parts) for parts in chunks.values()]  # layers come in order


class _Telling:
    """Operations, or fused ones, that tell `choices` of each row's experts."""

    def __init__(self, operations: Operations, choices: Choices) -> None:
        assert operations.fused is not None, "the C kernels are not built: run make setup"
        self._operations, self._fused, self._choices = operations, operations.fused, choices

    @property
    def fused(self) -> FusedOperations:
        return cast(FusedOperations, self)

    def __getattr__(self, name: str) -> Any:
        owner = self._fused if hasattr(self._fused, name) else self._operations
        return getattr(owner, name)

    def mixture(
        self, mixture: Mixture, x_TC: Tensor, chosen_TK: Tensor | None, image_T: Tensor | None
    ) -> Tensor:
        if chosen_TK is None:
            gate = Dense((mixture.router,), mixture.router.rows, mixture.router.columns)
            scores_TE = expert_scores(self._operations, x_TC, gate)
            self._choices.routed(mixture, numerics.top_k(scores_TE + mixture.bias, mixture.k))
        return self._fused.mixture(mixture, x_TC, chosen_TK, image_T)


@contextmanager
def told(model: Any, choices: Choices) -> Generator[None]:
    """While it lasts, our `model` tells `choices` of its experts too."""
    before = model.operations
    model.operations = _Telling(before, choices)
    try:
        yield
    finally:
        model.operations = before


@contextmanager
def settled(model: Any, choices: Choices, counts: TieCounts) -> Generator[None]:
    """While it lasts, transformers' `model` chooses as we do in a prompt's tied rows."""

    def select(ours_TK: Tensor) -> Any:
        def hook(module: Any, inputs: Any, scores_1TN: Tensor) -> Tensor:
            return settle_groups(scores_1TN[0], ours_TK, counts)[None]

        return hook

    def route(ours_TK: Tensor) -> Any:
        def hook(module: Any, inputs: Any, found: tuple[Tensor, Tensor, Tensor]) -> Any:
            logits_TE, _, theirs_TK = found
            chosen_TK = settle_experts(logits_TE, module.e_score_correction_bias, theirs_TK, ours_TK, counts)
            weights_TK = F.softplus(logits_TE).sqrt().gather(1, chosen_TK)
            weights_TK = weights_TK / (weights_TK.sum(1, keepdim=True) + 1e-20)
            return logits_TE, weights_TK * module.routed_scaling_factor, chosen_TK

        return hook

    hooks = [
        module.register_forward_hook(make(ours_TK))
        for kind, make, chosen in ((_INDEX_SCORER, select, choices.groups), (_ROUTER, route, choices.experts))
        for module, ours_TK in zip(_modules(model, kind), chosen, strict=True)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def settle_groups(scores_TN: Tensor, ours_TK: Tensor, counts: TieCounts) -> Tensor:
    """[T, N]: in tied rows that select otherwise than `ours_TK`, ours come first."""
    visible_T1 = (torch.arange(len(scores_TN))[:, None] + 1) // RATIO
    seen_TN = scores_TN.masked_fill(torch.arange(scores_TN.shape[1]) >= visible_T1, -torch.inf)
    if seen_TN.shape[1] <= ours_TK.shape[1]:
        return scores_TN
    change = _tied_rows(seen_TN, ours_TK, visible_T1[:, 0] > ours_TK.shape[1], counts)
    if len(change):
        scores_TN = scores_TN.clone()
        scores_TN[change[:, None], ours_TK[change]] += 2 * float(scores_TN.abs().max())
    return scores_TN


def settle_experts(
    logits_TE: Tensor, bias_E: Tensor, theirs_TK: Tensor, ours_TK: Tensor, counts: TieCounts
) -> Tensor:
    """[T, K]: `theirs_TK`, and ours in tied rows that differ."""
    scores_TE = F.softplus(logits_TE).sqrt() + bias_E
    change = _tied_rows(scores_TE, ours_TK, torch.ones(len(scores_TE), dtype=torch.bool), counts)
    return theirs_TK.index_copy(0, change, ours_TK[change])


def _tied_rows(scores_TN: Tensor, ours_TK: Tensor, chooses_T: Tensor, counts: TieCounts) -> Tensor:
    """int64: rows whose best are not ours, by a gap of at most TIE; all that differ are counted."""
    k = ours_TK.shape[1]
    best = scores_TN.topk(k + 1)
    gap_T = best.values[:, k - 1] - best.values[:, k]
    same_T = (best.indices[:, :k].sort(1).values == ours_TK.sort(1).values).all(1)
    differs_T = chooses_T & ~same_T
    tied = (differs_T & (gap_T <= TIE)).nonzero()[:, 0]
    counts.rows += int(chooses_T.sum())
    counts.settled += len(tied)
    counts.unexplained += int(differs_T.sum()) - len(tied)
    if len(tied):
        counts.widest = max(counts.widest, float(gap_T[tied].max()))
    return tied


def _modules(model: Any, kind: str) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__ == kind]
