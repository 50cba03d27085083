"""What a DeepSeek model asks of a device as one call each, where single operations would take longer to enter
than to run: `Operations.fused`. Models compose the same of single operations where there is none; that
composition, in engine/model/deepseek, is the reference.

The contract is that of `Operations`: a row's bits depend on that row's inputs alone. Weights are prepared
once and known by identity. Shapes: T rows, N streams, C channels, J = N (N + 2) coefficients, H heads, D head
size, E experts, K experts a row, W places of entries, P entries of a pool, R rotary channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from kernels.operations import Weight

LANES = 16  # of which widths are multiples: channels, head sizes, ranks, inner channels


@dataclass(frozen=True, slots=True, eq=False)
class HyperSite:
    """A site of the hyper-connections with the norm of its sub-layer."""

    projection: Weight  # [J, N C]
    base: Tensor  # [J]
    scale: Tensor  # [J]
    norm: Tensor  # [C]
    streams: int
    iterations: int
    eps: float
    norm_eps: float


class SiteRows(NamedTuple):
    """Of a site's rows: [T, N], [T, N], [T, N, N] from stream to stream; what the sub-layer reads, [T, C]."""

    pre: Tensor
    post: Tensor
    mix: Tensor
    normed: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    gate: Weight
    up: Weight
    down: Weight


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    """A router and its experts, the shared one last. `columns` of gate and up may be padded beyond C."""

    router: Weight
    bias: Tensor  # [E]
    image_bias: Tensor  # [E], of rows of images
    experts: tuple[ExpertWeights, ...]
    channels: int
    k: int
    limit: float
    scale: float


class Rotation(Protocol):
    """cos and sin of rows' positions, [T, R], each channel its own; sin is negative on even channels."""

    @property
    def cos(self) -> Tensor: ...
    @property
    def sin(self) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class KeyWeights:
    """Weights over the same rows; the first one's products are keys, which are normed and rotated."""

    weights: tuple[Weight, ...]
    norm: Tensor  # [D]
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class QueryWeights:
    """Rows to latents to heads, and with an indexer to its heads and their weights."""

    latent: Weight
    norm: Tensor
    query: Weight
    head_norm: Tensor | None  # [D]
    index_query: Weight | None
    head_weights: Weight | None
    head_channels: int
    index_channels: int
    index_scale: float  # of the heads' weights
    eps: float


class QueryRows(NamedTuple):
    """Rotated queries [T, H D]; with an indexer its heads' [T, I J], rotated, and weights [T, I], scaled."""

    q: Tensor
    index_q: Tensor | None
    head_weights: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class OutputWeights:
    """Groups of heads each through their own matrix, then all through one."""

    groups: tuple[Weight, ...]
    whole: Weight


@dataclass(frozen=True, slots=True)
class EntrySource:
    """Entries [P, D] that rows read: where the index is at least `first`, in order.

    The index is int64 [T, W], or [W] for all rows, of which each reads as many as `counts` says (int64 [T]).
    """

    pool: Tensor
    index: Tensor
    first: int
    counts: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """How a cache stores a row: codes in groups that share a scale, then rotary channels in bfloat16.

    Bytes are those of the codes, of the rotary channels, of the scales, and zeros up to `width`.
    """

    channels: int  # that have codes
    group: int
    width: int
    codes: Literal["e2m1", "e4m3"]
    scales: Literal["e4m3", "e8m0", "f32"]  # f32: a power of two
    largest: float  # value of a code
    least: float  # magnitude of a group; of an E4M3 scale, the scale itself
    rotary: int = 0


class FusedOperations(Protocol):
    """float32 on one device. Not thread-safe; every call blocks until its result is there."""

    def site(self, site: HyperSite, x_TNC: Tensor, premix_TN: Tensor | None) -> SiteRows:
        """A site's coefficients; its row is read with `premix_TN`, or with its own where that is None."""
        ...

    def spread(self, x_TNC: Tensor, y_TC: Tensor, post_TN: Tensor, mix_TNN: Tensor) -> Tensor:
        """[T, N, C]: post_k y + sum_j mix[j, k] X_j."""
        ...

    def mixture(
        self, mixture: Mixture, x_TC: Tensor, chosen_TK: Tensor | None, image_T: Tensor | None
    ) -> Tensor:
        """[T, C]. Experts are those of `chosen_TK`, or of the best scores. Raises ValueError: no numbers."""
        ...

    def keys(self, weights: KeyWeights, x_TK: Tensor, rotation: Rotation) -> list[Tensor]: ...

    def queries(self, weights: QueryWeights, x_TK: Tensor, rotation: Rotation) -> QueryRows: ...

    def attend(
        self,
        q_THD: Tensor,
        entries: Sequence[EntrySource],
        sink_H: Tensor,
        scale: float,
        rotation: Rotation | None,
    ) -> Tensor:
        """[T, H, D]: one softmax over all entries and the sink; rotated back where there is a rotation."""
        ...

    def output(self, weights: OutputWeights, x_TK: Tensor) -> Tensor: ...

    def index_scores(
        self, q_TIJ: Tensor, weights_TI: Tensor, pool_PJ: Tensor, keys_N: Tensor, visible_T: Tensor
    ) -> Tensor:
        """[T, N]: sum_i weights_i relu(q_i . k_j), -inf from visible[t] on; `keys_N`: rows of the pool."""
        ...

    def encode(self, layout: RecordLayout, x: Tensor) -> Tensor:
        """uint8 [..., width] of float32 [..., channels + rotary]."""
        ...

    def decode(self, layout: RecordLayout, stored: Tensor) -> Tensor:
        """float32 [..., channels + rotary] of uint8 [..., width]."""
        ...

    def top_k(self, scores_TN: Tensor, k: int) -> Tensor:
        """int64 [T, k]: positions of the largest scores, ascending, ties to the lowest; -1 for no more."""
        ...
