"""What a model's products of weights take alone, in torch: the floor under any arrangement of its layers.

Counted are the products of a step with every dense matrix, and with the experts that its rows go to, as many
rows an expert as they share evenly. Attention, norms and what else has no weight matrix are not.
Shapes: M rows, K columns in, N columns out, E experts.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Product:
    """`rows` times a matrix [N, K]."""

    rows: int
    matrix: Tensor


def products_of(model: Any, rows: int) -> list[Product]:
    """Of a step of `rows` through transformers' DeepSeek-V4, with logits of its last row alone."""
    experts, k = model.config.n_routed_experts, model.config.num_experts_per_tok
    busy = min(experts, rows * k)
    products: list[Product] = []
    for name, weight in model.named_parameters():
        if weight.dim() == 3 and ".experts." in name:
            products += [Product(max(1, rows * k // experts), weight[e]) for e in range(busy)]
        elif weight.dim() == 2 and name.endswith(".weight") and "embed" not in name:
            products.append(Product(1 if "lm_head" in name else rows, weight))
    return products


def seconds_of(products: Sequence[Product]) -> float:
    """The median of a few rounds through all of them; as long as a step of a large model each."""
    inputs = {(p.rows, p.matrix.shape[1]): torch.randn(p.rows, p.matrix.shape[1]) for p in products}
    rounds: list[float] = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        for product in products:
            F.linear(inputs[product.rows, product.matrix.shape[1]], product.matrix)
        rounds.append(time.perf_counter() - start)
    return median(rounds)
