"""What an attention makes of rows by products (section 2.1): keys, queries, and the output behind its heads.

Where operations have one of them in one call, it runs; what is here is the reference.
Shapes: T rows, C channels, H heads, D head size, Q rank of the query latent, I index heads of size J.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine import numerics
from engine.model.deepseek.norm import RmsNorm
from engine.model.deepseek.rope import Angles, rotate_
from engine.model.deepseek.shape import TextShape
from engine.model.tensor_source import TensorSource
from engine.numerics import Dense
from kernels.fused import LANES, KeyWeights, OutputWeights, QueryRows, QueryWeights
from kernels.operations import Operations, Weight


class Keys:
    """Entries of the window, and what else comes of the same rows by a product."""

    def __init__(
        self,
        config: TextShape,
        source: TensorSource,
        operations: Operations,
        prefix: str,
        more: tuple[Dense, ...],
    ) -> None:
        d = config.head_dim
        wkv = Dense.prepared(source.take(f"{prefix}.wkv.weight", (d, config.hidden_size)), operations)
        self._weights = (wkv, *more)
        self._norm = RmsNorm.take(source, f"{prefix}.kv_norm", d, config.rms_norm_eps)
        whole = wholes(self._weights)
        self._fused = None
        if whole is not None and d % LANES == 0:
            self._fused = KeyWeights(whole, self._norm.weight, self._norm.eps)

    def __call__(self, operations: Operations, x_TC: Tensor, angles: Angles) -> list[Tensor]:
        """[T, D], normed and rotated; then the others' products as they are."""
        if operations.fused is not None and self._fused is not None:
            return operations.fused.keys(self._fused, numerics.pad_columns(x_TC), angles)
        products = numerics.linear(operations, x_TC, self._weights)
        kv_TD = self._norm(operations, products[0])
        rotate_(kv_TD, angles)
        return [kv_TD, *products[1:]]


class Queries:
    """Of heads, and with an indexer of its heads too. `head_norm`: of each head, without weights (V4's)."""

    def __init__(
        self,
        config: TextShape,
        source: TensorSource,
        operations: Operations,
        prefix: str,
        *,
        indexed: bool,
        head_norm: bool = False,
    ) -> None:
        c, d, h, rank = config.hidden_size, config.head_dim, config.num_attention_heads, config.q_lora_rank
        eps, heads, width = config.rms_norm_eps, config.index_n_heads, config.index_head_dim
        self._d, self._width, self._scale = d, width, heads**-0.5 * width**-0.5
        self._latents = [Dense.prepared(source.take(f"{prefix}.wq_a.weight", (rank, c)), operations)]
        self._queries = [Dense.prepared(source.take(f"{prefix}.wq_b.weight", (h * d, rank)), operations)]
        self._norm = RmsNorm.take(source, f"{prefix}.q_norm", rank, eps)
        self._head_norm = RmsNorm(torch.ones(d), eps) if head_norm else None
        if indexed:
            query = source.take(f"{prefix}.indexer.wq_b.weight", (heads * width, rank))
            weights = source.take(f"{prefix}.indexer.weights_proj.weight", (heads, c))
            self._queries.append(Dense.prepared(query, operations))
            self._latents.append(Dense.of(weights))
        self._fused = self._in_one_call(rank)

    def __call__(self, operations: Operations, x_TC: Tensor, angles: Angles) -> QueryRows:
        """Rotated queries [T, H D]; with an indexer its heads' [T, I J], and scaled weights [T, I]."""
        if operations.fused is not None and self._fused is not None:
            return operations.fused.queries(self._fused, numerics.pad_columns(x_TC), angles)
        latent_TQ, *weights = numerics.linear(operations, x_TC, self._latents)
        q_TX, *index = numerics.linear(operations, self._norm(operations, latent_TQ), self._queries)
        if self._head_norm is not None:
            q_TX = self._head_norm(operations, q_TX.view(-1, self._d)).view_as(q_TX)
        for rows, width in zip((q_TX, *index), (self._d, self._width), strict=False):
            rotate_(rows.view(rows.shape[0], -1, width), angles)
        return QueryRows(q_TX, index[0], weights[0] * self._scale) if index else QueryRows(q_TX, None, None)

    def _in_one_call(self, rank: int) -> QueryWeights | None:
        latents, queries = wholes(self._latents), wholes(self._queries)
        if latents is None or queries is None or rank % LANES or self._d % LANES:
            return None
        head_norm = None if self._head_norm is None else self._head_norm.weight
        query, *index_query = queries
        latent, *head_weights = latents
        return QueryWeights(
            latent, self._norm.weight, query, head_norm, next(iter(index_query), None),
            next(iter(head_weights), None), self._d, self._width, self._scale, self._norm.eps,
        )  # fmt: skip


class GroupedOutput:
    """Groups of heads each through their own matrix, then all through one (section 2.1, step 8)."""

    def __init__(self, config: TextShape, source: TensorSource, operations: Operations, prefix: str) -> None:
        groups, rank = config.o_groups, config.o_lora_rank
        columns = config.num_attention_heads * config.head_dim // groups
        grouped = source.take(f"{prefix}.wo_a.weight", (groups * rank, columns))
        self._wo_a = [Dense.prepared(part, operations) for part in grouped.chunk(groups)]
        whole = source.take(f"{prefix}.wo_b.weight", (config.hidden_size, groups * rank))
        self._wo_b = Dense.prepared(whole, operations)
        parts, whole = wholes(self._wo_a), self._wo_b.whole
        self._fused = None
        if parts is not None and whole is not None:
            unpadded = parts[0].columns == columns and whole.columns == groups * rank
            self._fused = OutputWeights(parts, whole) if unpadded else None

    def __call__(self, operations: Operations, out_THD: Tensor) -> Tensor:
        """[T, C]."""
        if operations.fused is not None and self._fused is not None:
            return operations.fused.output(self._fused, out_THD.flatten(1))
        groups = out_THD.flatten(1).chunk(len(self._wo_a), 1)
        latents = [
            numerics.linear(operations, group.contiguous(), (weight,))[0]
            for group, weight in zip(groups, self._wo_a, strict=True)
        ]
        return numerics.linear(operations, torch.cat(latents, 1), (self._wo_b,))[0]


def wholes(weights: Sequence[Dense]) -> tuple[Weight, ...] | None:
    """Each one's only part, or None where one has several."""
    parts = [weight.whole for weight in weights]
    return None if None in parts else tuple(part for part in parts if part is not None)
