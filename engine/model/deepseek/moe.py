"""Mixture of experts (section 6): sqrt-softplus scores, bias-corrected selection, one shared expert.

Where operations have a mixture in one call, it runs; what is here is the reference, and what ranks that share
the experts run: each one's outputs stay apart by (row, slot), so that together they make the same bits.
Shapes: T rows, C channels, E experts, K experts a row, I inner channels, A = T*K assignments.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from engine import numerics
from engine.model.deepseek.shape import TextShape
from engine.model.tensor_source import TensorSource
from engine.numerics import Dense
from kernels.fused import LANES, ExpertWeights, Mixture
from kernels.operations import Operations
from protocol.errors import InvalidInput

_INNER = 32  # inner channels are padded to a multiple, with zeros that contribute nothing
_NORM_EPS = 1e-20


@dataclass(frozen=True, slots=True)
class Routes:
    """Each row's experts, ascending, and their weights: slot k of a row is its k-th."""

    experts: Tensor  # int64
    weights: Tensor


class Router:
    """Weights come from the scores alone; the bias takes part in the selection only."""

    def __init__(
        self,
        config: TextShape,
        source: TensorSource,
        prefix: str,
        experts: int,
        k: int,
        *,
        sees_images: bool = True,
    ) -> None:
        self.gate = Dense.of(source.take(f"{prefix}.weight", (experts, config.hidden_size)))
        self.bias_E = source.take(f"{prefix}.bias", (experts,))
        self.image_bias_E = source.take(f"{prefix}.bias_vl", (experts,)) if sees_images else self.bias_E
        self._k, self._scale = k, config.routed_scaling_factor

    def __call__(self, operations: Operations, x_TC: Tensor, image_T: Tensor | None) -> Routes:
        """g = sqrt(softplus(x gate)); top K of g + bias (`bias_vl` for image rows); w = scale g / sum g."""
        scores_TE = expert_scores(operations, x_TC, self.gate)
        bias = self.bias_E
        if image_T is not None:
            bias = torch.where(image_T[:, None], self.image_bias_E, self.bias_E)
        experts_TK = numerics.top_k(scores_TE + bias, self._k)
        if bool((experts_TK < 0).any()):
            raise ValueError("activations are not numbers: a row has no best experts")
        return Routes(experts_TK, expert_weights(scores_TE, experts_TK, self._scale))


def expert_scores(operations: Operations, x_TC: Tensor, gate: Dense) -> Tensor:
    """[T, E]: g = sqrt(softplus(x gate))."""
    return numerics.softplus(numerics.linear(operations, x_TC, (gate,))[0]).sqrt()


def expert_weights(scores_TE: Tensor, experts_TK: Tensor, scale: float) -> Tensor:
    """[T, K]: w = scale g / sum of the chosen g."""
    chosen_TK = scores_TE.gather(1, experts_TK)
    return chosen_TK / (numerics.tree_sum(chosen_TK, 1)[:, None] + _NORM_EPS) * scale


@dataclass(frozen=True, slots=True)
class Expert:
    """out = (silu(min(x w1, limit)) * clamp(x w3, +-limit)) w2."""

    gate: Dense  # w1
    up: Dense  # w3
    down: Dense  # w2

    @classmethod
    def take(
        cls, source: TensorSource, operations: Operations, prefix: str, channels: int, inner: int
    ) -> "Expert":
        missing = -inner % _INNER
        w1, w3 = (source.take(f"{prefix}.{name}.weight", (inner, channels)) for name in ("w1", "w3"))
        w2 = source.take(f"{prefix}.w2.weight", (channels, inner))
        if missing:
            w1, w3 = (F.pad(w, (0, 0, 0, missing)) for w in (w1, w3))
            w2 = F.pad(w2, (0, missing))
        return cls(*(Dense.prepared(w, operations) for w in (w1, w3, w2)))

    def weights(self) -> ExpertWeights | None:
        """None where a product falls into parts."""
        gate, up, down = self.gate.whole, self.up.whole, self.down.whole
        return None if gate is None or up is None or down is None else ExpertWeights(gate, up, down)


Exchange = Callable[[Tensor], Tensor]
"""Adds up all ranks' weighted outputs by (row, slot), [T, K, C], of the same rows. Blocks for the slowest.

Each slot is of one rank; the others give -0.0 there, which changes no bit of any sum. Called once a mixture,
layer after layer, by every rank. Raises nothing of its own.
"""


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's experts of one mixture, and how it comes by the others' outputs."""

    experts: frozenset[int]
    exchange: Exchange


def share_of(experts: frozenset[int] | None, exchange: Exchange | None) -> Share | None:
    """Of one mixture; None where all experts are here. Raises InvalidInput without a way to the others."""
    if experts is None:
        return None
    if exchange is None:
        raise InvalidInput(
            f"a part of {len(experts)} experts a layer, and no exchange with the ranks that hold the others",
            hint="give an `exchange`, or a part of all experts",
        )
    return Share(experts, exchange)


class MixtureOfExperts:
    """A router by scores, and its experts: all of them, or a rank's share."""

    def __init__(
        self,
        config: TextShape,
        source: TensorSource,
        operations: Operations,
        prefix: str,
        *,
        experts: int,
        experts_per_row: int,
        sees_images: bool = True,
        share: Share | None = None,
    ) -> None:
        self.router = Router(
            config, source, f"{prefix}.gate", experts, experts_per_row, sees_images=sees_images
        )
        self.experts = Experts(config, source, operations, prefix, experts, share=share)
        biases = self.router.bias_E, self.router.image_bias_E
        self._fused = self.experts.fused(self.router.gate, *biases, experts_per_row)

    def __call__(self, operations: Operations, x_TC: Tensor, image_T: Tensor | None) -> Tensor:
        """[T, C]; the bias for images serves the rows of `image_T`."""
        if operations.fused is not None and self._fused is not None:
            return operations.fused.mixture(self._fused, x_TC, None, image_T)
        return self.experts(operations, x_TC, self.router(operations, x_TC, image_T))


class Experts:
    """Expert outputs stay apart by (row, slot) and are added in slot order, then the shared expert's.

    Every rank has the shared expert and the router.
    """

    def __init__(
        self,
        config: TextShape,
        source: TensorSource,
        operations: Operations,
        prefix: str,
        experts: int,
        *,
        share: Share | None = None,
    ) -> None:
        c, inner = config.hidden_size, config.moe_intermediate_size
        self._limit, self._scale, self._channels = config.swiglu_limit, config.routed_scaling_factor, c
        self._shared = Expert.take(source, operations, f"{prefix}.shared_experts", c, inner)
        held = sorted(range(experts) if share is None else share.experts)
        self._experts = {e: Expert.take(source, operations, f"{prefix}.experts.{e}", c, inner) for e in held}
        self._held_E = torch.zeros(experts, dtype=torch.bool).index_fill_(0, torch.tensor(held).long(), True)
        self._share = share

    def fused(self, gate: Dense, bias_E: Tensor, image_bias_E: Tensor, k: int) -> Mixture | None:
        """All of it with its router, or None where the widths are not those of one call, or it is a share."""
        if self._share is not None:
            return None
        experts = [expert.weights() for expert in (*self._experts.values(), self._shared)]
        if gate.whole is None or None in experts or self._channels % LANES:
            return None
        return Mixture(
            gate.whole, bias_E, image_bias_E, tuple(e for e in experts if e is not None), self._channels, k,
            self._limit, self._scale,
        )  # fmt: skip

    def __call__(self, operations: Operations, x_TC: Tensor, routes: Routes) -> Tensor:
        """[T, C] of rows that have their routes."""
        weighted_TKC, shared_TC = self.by_slot(operations, x_TC, routes)
        if self._share is not None:
            weighted_TKC = self._share.exchange(weighted_TKC)
        return in_slot_order(weighted_TKC, shared_TC)

    def by_slot(self, operations: Operations, x_TC: Tensor, routes: Routes) -> tuple[Tensor, Tensor]:
        """Weighted outputs of the experts here, [T, K, C], -0.0 for the others; the shared one's, [T, C]."""
        (rows, k), experts_A = routes.experts.shape, routes.experts.flatten()
        order_A = experts_A.argsort(stable=True)  # assignments, expert by expert
        order_A = order_A[self._held_E[experts_A[order_A]]]
        counts = torch.bincount(experts_A, minlength=len(self._held_E)) * self._held_E
        outputs_AC = self._run_all(operations, x_TC, order_A // k, counts)
        routed_AC = torch.full((rows * k, x_TC.shape[1]), -0.0)
        routed_AC[order_A] = outputs_AC[rows:]
        return routed_AC.view(rows, k, -1) * routes.weights[:, :, None], outputs_AC[:rows]

    def _run_all(self, operations: Operations, x_TC: Tensor, rows_A: Tensor, counts_E: Tensor) -> Tensor:
        """[T + A, C]: the shared expert on every row, then each expert on its rows, in order of `rows_A`."""
        busy = [(e, int(count)) for e, count in enumerate(counts_E.numpy()) if count]
        experts = [self._shared, *(self._experts[e] for e, _ in busy)]
        stops = accumulate((count for _, count in busy), initial=x_TC.shape[0])
        parts = [slice(start, stop) for start, stop in pairwise((0, *stops))]
        if x_TC.shape[0] == 1 and len(busy) == rows_A.shape[0]:  # one row for all: one call
            products = numerics.linear(operations, x_TC, [w for e in experts for w in (e.gate, e.up)])
            pairs = list(zip(products[::2], products[1::2], strict=True))
        else:
            inputs = torch.cat((x_TC, x_TC[rows_A]))
            pairs = [
                tuple(numerics.linear(operations, inputs[part], (expert.gate, expert.up)))
                for expert, part in zip(experts, parts, strict=True)
            ]
        gate = torch.cat([gate for gate, _ in pairs]).clamp_(max=self._limit)
        up = torch.cat([up for _, up in pairs]).clamp_(-self._limit, self._limit)
        inner = numerics.silu_mul(gate, up)
        return torch.cat([
            numerics.linear(operations, inner[part], (expert.down,))[0]
            for expert, part in zip(experts, parts, strict=True)
        ])  # fmt: skip


def in_slot_order(weighted_TKC: Tensor, shared_TC: Tensor) -> Tensor:
    """[T, C]: slot after slot, then the shared expert's."""
    total_TC = weighted_TKC[:, 0]
    for slot in range(1, weighted_TKC.shape[1]):
        total_TC = total_TC + weighted_TKC[:, slot]
    return total_TC + shared_TC
