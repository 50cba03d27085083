"""Manifold-constrained hyper-connections, single-pass (section 5).

Shapes: T rows, N streams, C channels, J = N + N + N*N coefficients of a site. Where operations have a site in
one call, it runs; what is here is the reference.
V4.1 delays the input mix by one sub-layer: a site reads the stream with the `pre` of the site before it, and
hands its own on. V4 reads with the site's own `pre`; everything else is the same.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine import numerics
from engine.model.deepseek.norm import RmsNorm
from engine.model.deepseek.shape import TextShape
from engine.model.tensor_source import TensorSource
from engine.numerics import Dense
from kernels.fused import LANES, HyperSite
from kernels.limits import MAX_STREAMS
from kernels.operations import Operations

_CHAIN = 8  # terms from which on NumPy's order depends on the layout


@dataclass(frozen=True, slots=True)
class Stream:
    """What goes from block to block: the streams, and the input mix for the next site."""

    x: Tensor
    premix: Tensor

    @classmethod
    def of(cls, embedded_TC: Tensor, streams: int) -> "Stream":
        """Every stream a copy of the embedding; the mix takes the first."""
        premix_TN = torch.zeros(embedded_TC.shape[0], streams)
        premix_TN[:, 0] = 1.0
        return cls(embedded_TC[:, None].repeat(1, streams, 1), premix_TN)

    def __getitem__(self, rows: Tensor) -> "Stream":
        return Stream(self.x[rows], self.premix[rows])

    def collapse(self) -> Tensor:
        """[T, C]: sum_k premix_k X_k."""
        return numerics.tree_sum(self.premix[:, :, None] * self.x, 1)


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Of one site and each row: `pre` in, `post` out, `mix` [N, N] from stream to stream."""

    pre: Tensor
    post: Tensor
    mix: Tensor

    def __getitem__(self, rows: Tensor) -> "Coefficients":
        return Coefficients(self.pre[rows], self.post[rows], self.mix[rows])


class HyperConnection:
    """One site: the attention's or the feed-forward's of a layer, with the norm of what it reads."""

    def __init__(self, config: TextShape, source: TensorSource, prefix: str, norm: RmsNorm) -> None:
        n, total = config.hc_mult, config.hc_mult * (config.hc_mult + 2)
        self._streams, self._eps, self._norm_eps = n, config.hc_eps, config.rms_norm_eps
        self._iterations = config.hc_sinkhorn_iters
        self._projection = Dense.of(source.take(f"{prefix}_fn", (total, n * config.hidden_size)))
        self._base_J = source.take(f"{prefix}_base", (total,))
        scale = source.take(f"{prefix}_scale", (3,))
        self._scale_J = scale.repeat_interleave(torch.tensor([n, n, n * n]))
        self._norm = norm
        self._site = self._fused(config.hidden_size)

    def enter(
        self,
        operations: Operations,
        x_TNC: Tensor,
        premix_TN: Tensor | None = None,
        picked: Tensor | None = None,
    ) -> tuple[Coefficients, Tensor]:
        """The site's coefficients; what its sub-layer reads, [T, C], with a mix handed on or with its own.

        Coefficients are those of the picked rows, or of all. `picked` comes with a mix handed on.
        """
        if operations.fused is not None and self._site is not None:
            rows = operations.fused.site(self._site, x_TNC, premix_TN)
            coefficients = Coefficients(rows.pre, rows.post, rows.mix)
            return coefficients if picked is None else coefficients[picked], rows.normed
        coefficients = self.coefficients(operations, x_TNC if picked is None else x_TNC[picked])
        stream = Stream(x_TNC, coefficients.pre if premix_TN is None else premix_TN)
        return coefficients, self._norm(operations, stream.collapse())

    def _fused(self, channels: int) -> HyperSite | None:
        n, weight = self._streams, self._projection.whole
        if weight is None or weight.columns != n * channels or channels % LANES or n > MAX_STREAMS:
            return None
        return HyperSite(
            weight, self._base_J, self._scale_J, self._norm.weight, n, self._iterations, self._eps,
            self._norm_eps,
        )  # fmt: skip

    def coefficients(self, operations: Operations, x_TNC: Tensor) -> Coefficients:
        """From the stream as it enters the site.

        m = F vec(X) / sqrt(mean(vec(X)^2) + eps); pre = sigmoid(s0 m + b) + hc_eps;
        post = 2 sigmoid(s1 m + b); mix = Sinkhorn(softmax over rows(s2 m + b) + hc_eps).
        """
        n, flat = self._streams, x_TNC.flatten(1)
        product = numerics.linear(operations, flat, (self._projection,))[0]
        m_TJ = product * (numerics.mean_square(flat) + self._norm_eps).rsqrt() * self._scale_J + self._base_J
        gates = numerics.sigmoid(m_TJ[:, : 2 * n])
        mix_TNN = numerics.softmax(m_TJ[:, 2 * n :].reshape(-1, n, n)) + self._eps
        return Coefficients(
            gates[:, :n] + self._eps, 2 * gates[:, n:], sinkhorn(mix_TNN, self._iterations, self._eps)
        )


class StreamReader:
    """What a site would read, [T, C], of a part that lacks the site's own weights: to the same bits."""

    def __init__(self, config: TextShape, norm: RmsNorm) -> None:
        self._site = HyperConnection(config, _NoCoefficients(), "", norm)

    def __call__(self, operations: Operations, stream: Stream) -> Tensor:
        return self._site.enter(operations, stream.x, stream.premix)[1]


class _NoCoefficients:
    """Zeros: where a site is one call, it makes its coefficients beside what it reads, and nobody asks."""

    def __contains__(self, name: object) -> bool:
        return True

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape)

    def check_all_taken(self) -> None: ...


def sinkhorn(mix_TNN: Tensor, iterations: int, eps: float) -> Tensor:
    """Columns, then `iterations` - 1 times rows and columns, each divided by its sum + eps.

    Hundreds of tiny steps: NumPy takes a third of torch's time for each. Sums are chains of additions.
    """
    mix_NNT = np.array(mix_TNN.permute(1, 2, 0).numpy(), order="C")  # a copy, also of one row
    _divide_by_sums(mix_NNT, eps)
    transposed = mix_NNT.swapaxes(0, 1)  # the same memory
    for _ in range(iterations - 1):
        _divide_by_sums(transposed, eps)
        _divide_by_sums(mix_NNT, eps)
    return torch.from_numpy(mix_NNT).permute(2, 0, 1).contiguous()  # pyright: ignore[reportUnknownMemberType]


def _divide_by_sums(mix_NNT: NDArray[np.float32], eps: float) -> None:
    """Over the first dimension, in place. NumPy adds fewer than eight terms one after the other."""
    if len(mix_NNT) < _CHAIN:
        sums: NDArray[np.float32] = np.add.reduce(mix_NNT, 0)
    else:
        sums = mix_NNT[0] + mix_NNT[1]
        for row in mix_NNT[2:]:
            sums += row
    sums += eps
    mix_NNT /= sums


def add_output(operations: Operations, x_TNC: Tensor, y_TC: Tensor, coefficients: Coefficients) -> Stream:
    """X'_k = post_k y + sum_j mix[j, k] X_j; `pre` becomes the mix of the next site."""
    if operations.fused is not None and x_TNC.shape[2] % LANES == 0 and x_TNC.shape[1] <= MAX_STREAMS:
        spread = operations.fused.spread(x_TNC, y_TC, coefficients.post, coefficients.mix)
        return Stream(spread, coefficients.pre)
    mixed_TNC = numerics.batched_product(coefficients.mix.transpose(1, 2), x_TNC)
    mixed_TNC += coefficients.post[:, :, None] * y_TC[:, None]
    return Stream(mixed_TNC, coefficients.pre)
