"""The few functions through which a model's rows meet: a row's bits depend on that row's inputs alone.

Elementwise arithmetic is exact rounding and needs no care; products, sums, transcendental functions and
selections do, and are here. docs/decisions/0002 has the reasons; tests/unit/engine hold every function to it.
Shapes: T rows, K columns in, N columns out, B products of a batch, S terms.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels import reductions
from kernels.limits import BLOCK, MAX_COLUMNS
from kernels.operations import Operations, Weight
from kernels.reductions import is_cut, one_thread
from kernels.whole_numbers import whole_numbers

_KEY_TILE = 64  # keys a product where the operations round a column with its neighbours
_ALIGNED = 16  # float32 values: 64 bytes, as PyTorch aligns a tensor
_NO_INDEX = -1

# What models call instead of torch's own and NumPy's: a test under tests/unit/engine reads their source.
GUARDED = {
    **dict.fromkeys(
        (
            "linear",
            "bilinear",
            "mm",
            "mv",
            "addmm",
            "addmv",
            "addmm_",
            "addmv_",
            "addr",
            "chain_matmul",
            "multi_dot",
        ),
        "linear",
    ),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), "linear"),
    **dict.fromkeys(("inner", "dot", "vdot", "vecdot", "cdist"), "dot_products"),
    **dict.fromkeys(("bmm", "addbmm", "addbmm_", "baddbmm", "baddbmm_"), "batched_product"),
    **dict.fromkeys(("einsum", "tensordot"), "batched_product"),
    **dict.fromkeys(("matmul", "__matmul__", "__rmatmul__"), "linear, dot_products or batched_product"),
    **dict.fromkeys(("cosine_similarity", "pairwise_distance"), "dot_products"),
    "scaled_dot_product_attention": "engine.model.deepseek.core_attention.attend",
    **dict.fromkeys(("sum", "nansum", "prod", "reduce", "segment_reduce"), "row_sum or tree_sum"),
    **dict.fromkeys(("index_add", "index_add_", "scatter_add", "scatter_add_"), "tree_sum"),
    **dict.fromkeys(("scatter_reduce", "scatter_reduce_", "index_reduce_", "embedding_bag"), "tree_sum"),
    **dict.fromkeys(("mean", "nanmean", "average", "var", "std", "var_mean", "std_mean"), "mean_square"),
    **dict.fromkeys(("norm", "vector_norm", "normalize"), "mean_square"),
    **dict.fromkeys(("layer_norm", "rms_norm", "group_norm"), "engine.model.deepseek.norm.RmsNorm"),
    **dict.fromkeys(("cumsum", "cumsum_", "cumprod", "cumprod_"), "running_count, of whole numbers"),
    **dict.fromkeys(("logcumsumexp", "accumulate"), "running_count, of whole numbers"),
    **dict.fromkeys(("fft", "rfft", "ifft", "irfft"), "a sum in a fixed order"),
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "logsumexp"), "softmax"),
    **dict.fromkeys(("sigmoid", "sigmoid_", "logsigmoid", "expit", "tanh", "tanh_", "erf"), "sigmoid"),
    **dict.fromkeys(("silu", "gelu", "elu", "selu", "mish", "glu"), "silu_mul"),
    "softplus": "softplus",
    **dict.fromkeys(("topk", "kthvalue", "argmax", "argmin"), "top_k"),
}


@dataclass(frozen=True, slots=True)
class Dense:
    """A matrix [rows, columns] for `linear`: zero-padded and split along K once, at load.

    A part whose values all are bfloat16's is kept as such, in half the bytes: released weights are.
    """

    parts: tuple[Weight, ...]
    rows: int
    columns: int

    @classmethod
    def of(cls, matrix_NK: Tensor, *, narrow: bool = True) -> "Dense":
        """In float32, in each profile. `narrow`: look for bfloat16, not worth it for a matrix of one step."""
        return cls._of_parts(matrix_NK, lambda part: _weight(part, narrow))

    @classmethod
    def prepared(cls, matrix_NK: Tensor, operations: Operations) -> "Dense":
        """In `fast` in whole numbers where the values are those of FP8 or FP4, else as `of` has it.

        For matrices that releases store so. One of bfloat16 or float32 would lose bits that its folder has:
        it stays as it is.
        """

        def make(part: Tensor) -> Weight:
            found = whole_numbers(part)
            return _weight(part, narrow=True) if found is None else operations.prepare(found)

        return cls.of(matrix_NK) if operations.profile == "exact" else cls._of_parts(matrix_NK, make)

    @classmethod
    def _of_parts(cls, matrix_NK: Tensor, make: Callable[[Tensor], Weight]) -> "Dense":
        rows, columns = matrix_NK.shape
        padded = pad_columns(matrix_NK)
        parts = (padded[:, start : start + MAX_COLUMNS].contiguous() for start in _starts(padded))
        return cls(tuple(map(make, parts)), rows, columns)

    @property
    def whole(self) -> Weight | None:
        """The only part, where there is only one."""
        return self.parts[0] if len(self.parts) == 1 else None


def _weight(part_NK: Tensor, narrow: bool) -> Weight:
    rows, columns = part_NK.shape
    if narrow and torch.equal((rounded := part_NK.bfloat16()).float(), part_NK):
        return Weight(rounded, rows, columns, "bf16")
    return Weight(part_NK, rows, columns, "f32")


def linear(operations: Operations, x_TK: Tensor, weights: Sequence[Dense]) -> list[Tensor]:
    """x times each weight's transpose, [T, N] a weight, all over the same columns."""
    x_TK = pad_columns(x_TK)
    if len(weights[0].parts) == 1:
        return operations.linear(x_TK, [weight.parts[0] for weight in weights])
    outs = [torch.zeros(x_TK.shape[0], weight.rows) for weight in weights]
    for index, start in enumerate(_starts(x_TK)):
        x = x_TK[:, start : start + MAX_COLUMNS].contiguous()
        products = operations.linear(x, [weight.parts[index] for weight in weights])
        outs = [out + product for out, product in zip(outs, products, strict=True)]
    return outs


def _starts(x_TK: Tensor) -> range:
    """Where the parts begin that products over many columns fall into."""
    return range(0, x_TK.shape[1], MAX_COLUMNS)


def pad_columns(x_TK: Tensor) -> Tensor:
    """Zero columns up to the multiple that products take; the same tensor where there is nothing to add."""
    missing = -x_TK.shape[1] % BLOCK
    return F.pad(x_TK, (0, missing)) if missing else x_TK


def dot_products(operations: Operations, x_TK: Tensor, keys_NK: Tensor) -> Tensor:
    """[T, N]; an element depends on its row and its key alone, however many there are of either."""
    x_TK, keys_NK = pad_columns(x_TK), pad_columns(keys_NK).contiguous()
    count, width = keys_NK.shape
    if operations.name == "c":  # an accumulator an element, in a fixed order
        return operations.linear(x_TK, [Weight(keys_NK, count, width, "f32")])[0]
    tiles = F.pad(keys_NK, (0, 0, 0, -count % _KEY_TILE)).view(-1, _KEY_TILE, width)
    products = operations.linear(x_TK, [Weight(tile, _KEY_TILE, width, "f32") for tile in tiles])
    return torch.cat(products, 1)[:, :count]


def batched_product(a_BTK: Tensor, b_BKN: Tensor) -> Tensor:
    """B products of one shape, [B, T, N]. Callers keep T, K and N free of the number of rows of a step.

    On one thread: with more, a single product is cut otherwise than one of many, and rounds otherwise. Where
    matrices would not all begin at an aligned address, K and N are padded with zeros: a product's bits depend
    on where its matrices lie.
    """
    (_, t, k), n = a_BTK.shape, b_BKN.shape[2]
    if any(size % _ALIGNED for size in (t * k, k * n, t * n)):
        a_BTK = F.pad(a_BTK, (0, -k % _ALIGNED))
        b_BKN = F.pad(b_BKN, (0, -n % _ALIGNED, 0, -k % _ALIGNED))
    with one_thread():
        return torch.bmm(a_BTK, b_BKN)[:, :, :n].contiguous()


def tree_sum(x: Tensor, dim: int) -> Tensor:
    """Sum over a dimension by folding it in half: the order depends on its length alone."""
    while (size := x.shape[dim]) > 1:
        half = (size + 1) // 2
        low, high = x.narrow(dim, 0, size - half), x.narrow(dim, half, size - half)
        folded = low + high
        x = folded if size % 2 == 0 else torch.cat((folded, x.narrow(dim, half - 1, 1)), dim)
    return x.squeeze(dim)


mean_square = reductions.mean_square


def row_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, which it keeps: one reduction a row."""
    x = x.contiguous()
    if not is_cut(x):
        return x.sum(-1, keepdim=True)
    with one_thread():
        return x.sum(-1, keepdim=True)


def running_count(counts: Tensor, dim: int) -> Tensor:
    """Cumulative sums of whole numbers or flags, which no order changes."""
    assert not counts.is_floating_point()
    return counts.cumsum(dim)


def softmax(x: Tensor) -> Tensor:
    """Over the last dimension, contiguous: one reduction a row."""
    return x.contiguous().softmax(-1)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)). torch.sigmoid rounds the last few elements of a tensor otherwise than the rest."""
    return (1 + (-x).exp()).reciprocal()


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return gate / (1 + (-gate).exp()) * up


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), without overflow."""
    return x.clamp(min=0) + (-x.abs()).exp().log1p()


def top_k(scores_TN: Tensor, k: int, operations: Operations | None = None) -> Tensor:
    """int64 [T, min(k, N)]: the positions of each row's largest scores in ascending order.

    Ties at the boundary go to the lowest positions. A score of -inf, or that is no number, is never taken:
    its place holds -1, last.
    Raises ValueError: k is negative.
    """
    count = scores_TN.shape[1]
    if k < 0:
        raise ValueError(f"k is {k}, expected 0 or more")
    if operations is not None and operations.fused is not None:
        return operations.fused.top_k(scores_TN, min(k, count))
    if k == 0:
        return torch.empty(scores_TN.shape[0], 0, dtype=torch.int64)
    scores_TN = scores_TN.masked_fill(scores_TN.isnan(), -torch.inf)
    if k < count:
        values, picked = torch.topk(scores_TN, k + 1, dim=1)
        picked = picked[:, :k]
        least = values[:, k - 1]
        tied = (least == values[:, k]) & (least > -torch.inf)
        if bool(tied.any()):
            picked[tied] = _lowest_of_ties(scores_TN[tied], least[tied, None], k)
    else:
        picked = torch.arange(count).expand(scores_TN.shape[0], count)
    taken = scores_TN.gather(1, picked) > -torch.inf
    ordered = torch.where(taken, picked, count).sort(1).values
    return ordered.masked_fill_(ordered == count, _NO_INDEX)


def _lowest_of_ties(scores_TN: Tensor, least_T1: Tensor, k: int) -> Tensor:
    """All positions above the k-th score, and the lowest of those that equal it, k a row."""
    above, equal = scores_TN > least_T1, scores_TN == least_T1
    room_T1 = k - above.sum(1, keepdim=True)
    taken = above | (equal & (equal.cumsum(1) <= room_T1))
    return taken.nonzero()[:, 1].view(-1, k)
