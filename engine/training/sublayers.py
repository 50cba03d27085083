"""What every block does, of the backbone and of the drafts: products, norms, mixings and experts."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.model.deepseek.config import DeepseekConfig
from engine.training.mechanisms import (
    Experts,
    Site,
    collapse,
    mixing,
    mixture,
    rms_norm,
    route,
    spread,
    swiglu,
)
from engine.training.parameters import Parameters

Round = Callable[[Tensor], Tensor]
"""Rounds values to what a format holds, and lets gradients through as if it had not."""


def exactly(x: Tensor) -> Tensor:
    """No rounding."""
    return x


@dataclass(frozen=True, slots=True)
class Rounding:
    """What the released formats make of caches and expert weights; `exactly` until the last part."""

    window: Round = exactly
    main: Round = exactly
    index: Round = exactly
    experts: Round = exactly


@dataclass(frozen=True, slots=True)
class Balance:
    """How the experts were used: a loss a layer, and rows an expert by layer."""

    losses: list[Tensor] = field(default_factory=list[Tensor])
    loads: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


@dataclass(frozen=True, slots=True)
class Streams:
    """The state between sub-layers: [N, S, C], and what the next one collapses it by, [N, S] (section 5)."""

    x: Tensor
    pre: Tensor

    @classmethod
    def of(cls, embedded_NC: Tensor, count: int) -> "Streams":
        pre_NS = torch.zeros(len(embedded_NC), count)
        pre_NS[:, 0] = 1.0
        return cls(embedded_NC.unsqueeze(1).expand(-1, count, -1).contiguous(), pre_NS)

    def collapsed(self) -> Tensor:
        return collapse(self.x, self.pre)


@dataclass(frozen=True, slots=True)
class SubLayers:
    """Weights by name, and the arithmetic that blocks share. N rows, C channels."""

    config: DeepseekConfig
    p: Parameters
    rounding: Rounding
    balance: Balance

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.p[f"{name}.weight"].T

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.p[f"{name}.weight"], self.config.rms_norm_eps)

    def site(self, at: str, site: str, streams: Streams, compute: Callable[[Tensor], Tensor]) -> Streams:
        """A sub-layer between its mixings; what it collapses by comes from the site before."""
        c = self.config
        pre, post, mix = mixing(
            streams.x, Site.of(self.p, f"{at}hc_{site}"),
            iterations=c.hc_sinkhorn_iters, norm_eps=c.rms_norm_eps, eps=c.hc_eps,
        )  # fmt: skip
        y_NC = compute(self.norm(streams.collapsed(), f"{at}{site}_norm"))
        return Streams(spread(streams.x, y_NC, post, mix), pre)

    def grouped_output(self, at: str, out_NX: Tensor) -> Tensor:
        """Heads in groups, each to a low rank, then to the channels (section 2.1, step 8)."""
        c = self.config
        by_group = self.p[f"{at}wo_a.weight"].view(c.o_groups, c.o_lora_rank, -1)
        low = torch.einsum("ngi,goi->ngo", out_NX.view(len(out_NX), c.o_groups, -1), by_group)
        return self.linear(low.flatten(1), f"{at}wo_b")

    def feed_forward(self, at: str, x_NC: Tensor, count: int, sequences: int) -> Tensor:
        """Each row's `count` experts and the shared one (section 6). `sequences`: that the rows belong to."""
        c = self.config
        gate, bias = self.p[f"{at}ffn.gate.weight"], self.p[f"{at}ffn.gate.bias"]
        routing = route(x_NC, gate, bias, count=count, scaling=c.routed_scaling_factor)
        loads_BE = sequence_loads(routing.experts, len(gate), sequences)
        self.balance.loads[at] = loads_BE.sum(0)
        self.balance.losses.append(balance_loss(routing.scores, loads_BE))
        stacks = Experts.of(self.p, f"{at}ffn.experts.", self.rounding.experts)
        own = Experts(*(self.p[f"{at}ffn.shared_experts.{name}.weight"] for name in ("w1", "w2", "w3")))
        return mixture(x_NC, routing, stacks, c.swiglu_limit) + swiglu(x_NC, own, c.swiglu_limit)


def sequence_loads(experts_NK: Tensor, num_experts: int, sequences: int) -> Tensor:
    """Rows an expert of each sequence, [B, E]; the N rows are sequence after sequence."""
    of_sequence = experts_NK.view(sequences, -1)
    return torch.zeros(sequences, num_experts).scatter_add_(1, of_sequence, torch.ones(of_sequence.shape))


def balance_loss(scores_NE: Tensor, loads_BE: Tensor) -> Tensor:
    """1 where every sequence uses all experts alike, more where a sequence prefers some (section 13).

    The mean over sequences of sum_e share_e load_e / mean load: shares of the scores carry the gradient.
    """
    shares_NE = scores_NE / scores_NE.sum(-1, keepdim=True)
    shares_BE = shares_NE.view(len(loads_BE), -1, scores_NE.shape[1]).mean(1)
    return (shares_BE * loads_BE / loads_BE.mean(-1, keepdim=True)).sum(-1).mean()
