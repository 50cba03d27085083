"""Muon for matrices, AdamW for the rest (fact sheet, section 13): norms and other vectors do not decay.

Muon (Jordan 2024) steps along the orthogonal factor of the momentum, found by a Newton-Schulz iteration.
Matrices of one shape go through it together, in float32: this is made for processors without bfloat16 units.
"""

import math
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.training.mechanisms import pieces
from engine.training.parameters import Parameters

_ROUNDS = 5
_QUINTIC = (3.4445, -4.7750, 2.0315)
_BY_ADAM = ("embed.weight", "head.weight", ".ffn.gate.weight", "_fn", "weights_proj.weight")
_SCALES = ("q_weight", "k_weight")  # of norms, a row a stream
_MEAN, _SQUARE = 0.1, 0.02  # what a step adds to Adam's averages


@dataclass(frozen=True, slots=True)
class Rates:
    """Of one step. Muon's is per unit of spectral norm."""

    muon: float
    adam: float


def takes_muon(name: str, tensor: Tensor) -> bool:
    """Matrices, and stacks of them, that are neither tables nor routers."""
    return tensor.dim() >= 2 and not name.endswith((*_BY_ADAM, *_SCALES))


def decays(name: str, tensor: Tensor) -> bool:
    """Matrices and tables: a norm's weight or a bias has no reason to be small."""
    return tensor.dim() >= 2 and not name.endswith(_SCALES)


def orthogonalised(g_XMN: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrices of a batch, roughly: singular values end between 0.7 and 1.2."""
    tall = g_XMN.shape[-2] > g_XMN.shape[-1]
    x = g_XMN.mT if tall else g_XMN
    x = x / (x.square().sum((-2, -1), keepdim=True).sqrt() + 1e-7)
    a, b, c = _QUINTIC
    for _ in range(_ROUNDS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x


class Optimiser:
    """Steps parameters in place. Its state is plain tensors by name, for a checkpoint."""

    def __init__(self, parameters: Parameters, *, weight_decay: float = 0.05) -> None:
        self._decay = weight_decay
        self.state: dict[str, Tensor] = {}
        self._stacks: dict[tuple[int, int], list[str]] = defaultdict(list)
        for name, tensor in parameters.items():
            if takes_muon(name, tensor):
                self.state[f"{name}#momentum"] = torch.zeros_like(tensor)
                self._stacks[(tensor.shape[-2], tensor.shape[-1])].append(name)
            else:
                self.state[f"{name}#mean"] = torch.zeros_like(tensor)
                self.state[f"{name}#square"] = torch.zeros_like(tensor)
                self.state[f"{name}#steps"] = torch.zeros((), dtype=torch.int64)

    @torch.no_grad()
    def step(self, parameters: Parameters, gradients: Parameters, rates: Rates) -> None:
        """One update from gradients by name; a parameter without one stays, and so does its state."""
        for shape, names in self._stacks.items():
            self._muon(parameters, gradients, [n for n in names if n in gradients], shape, rates.muon)
        for name, gradient in gradients.items():
            if f"{name}#mean" in self.state:
                self._adam(name, parameters[name], gradient, rates.adam)

    def _muon(
        self,
        parameters: Parameters,
        gradients: Parameters,
        names: list[str],
        shape: tuple[int, int],
        rate: float,
    ) -> None:
        if not names:
            return
        wanted: list[Tensor] = []
        for name in names:
            momentum = self.state[f"{name}#momentum"].lerp_(gradients[name], 0.05)
            wanted.append(gradients[name].lerp(momentum, 0.95).reshape(-1, *shape))
        steps = pieces(orthogonalised(torch.cat(wanted)), map(len, wanted))
        scale = rate * math.sqrt(max(1.0, shape[0] / shape[1]))
        for name, step in zip(names, steps, strict=True):
            parameter = parameters[name]
            parameter.mul_(1.0 - rate * self._decay).add_(step.reshape(parameter.shape), alpha=-scale)

    def _adam(self, name: str, parameter: Tensor, gradient: Tensor, rate: float) -> None:
        """Averages are corrected by this parameter's own steps, which may be fewer than others'."""
        mean, square, steps = (self.state[f"{name}#{part}"] for part in ("mean", "square", "steps"))
        steps += 1
        mean.lerp_(gradient, _MEAN)
        square.lerp_(gradient.square(), _SQUARE)
        unbiased = mean / (1.0 - (1.0 - _MEAN) ** int(steps))
        spread = (square / (1.0 - (1.0 - _SQUARE) ** int(steps))).sqrt_().add_(1e-9)
        if decays(name, parameter):
            parameter.mul_(1.0 - rate * self._decay)
        parameter.addcdiv_(unbiased, spread, value=-rate)
