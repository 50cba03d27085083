"""What a step minimises: the next token, the indexer's imitation, the balance of the experts."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.training.network import Batch, Mode, Network
from engine.training.parameters import Parameters

INDEX_WEIGHT, BALANCE_WEIGHT = 0.1, 1e-3
_HEAD_ROWS = 2048  # logits of so many rows at a time: all of them would be the step's largest tensor


@dataclass(frozen=True, slots=True)
class Loss:
    """nats a token, and the parts beside it. `loads` are rows an expert, by layer."""

    total: Tensor
    nats: float
    index: float
    loads: dict[str, Tensor]


def loss_of(network: Network, p: Parameters, batch: Batch, targets_BT: Tensor, mode: Mode) -> Loss:
    """One pass. Rows that a replay leaves without an output do not count."""
    hidden, found = network.forward(p, batch, mode)
    counted = rows_with_output(batch, targets_BT, network.config.sliding_window)
    nats = cross_entropy(hidden[counted], p["head.weight"], targets_BT[counted])
    index = torch.stack(found.index_losses).mean() if found.index_losses else torch.zeros(())
    balance = torch.stack(found.balance.losses).mean()
    total = nats + INDEX_WEIGHT * index + BALANCE_WEIGHT * balance
    return Loss(total, float(nats.detach()), float(index.detach()), found.balance.loads)


def rows_with_output(batch: Batch, targets_BT: Tensor, window: int) -> Tensor:
    """True for a span's last rows and those after it; for all without a span: [B, T]."""
    if batch.span_ends is None:
        return torch.ones_like(targets_BT, dtype=torch.bool)
    first = (batch.span_ends - window).clamp_min(0).unsqueeze(1)
    return torch.arange(targets_BT.shape[1]).unsqueeze(0) >= first


def cross_entropy(hidden_NC: Tensor, head_VC: Tensor, targets_N: Tensor) -> Tensor:
    """Mean nats."""
    total = hidden_NC.new_zeros(())
    for start in range(0, len(hidden_NC), _HEAD_ROWS):
        rows = slice(start, start + _HEAD_ROWS)
        total = total + F.cross_entropy(hidden_NC[rows] @ head_VC.T, targets_N[rows], reduction="sum")
    return total / len(targets_N)
