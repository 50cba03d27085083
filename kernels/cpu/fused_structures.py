"""What is in `kernels.fused` as C reads it (deepseek.h), with lengths and types checked: C trusts them.

A wrong one is a ValueError that names it.
"""

import ctypes

import torch

from kernels.cpu.library import CWeight
from kernels.cpu.structures import (
    c_weight,
    check_multiple,
    check_rows,
    check_tensor,
    check_weight,
    is_plain,
    require,
)
from kernels.fused import (
    LANES,
    EntrySource,
    HyperSite,
    Mixture,
    OutputWeights,
    QueryWeights,
    RecordLayout,
    Rotation,
)
from kernels.limits import BLOCK, MAX_STREAMS
from kernels.operations import Weight

_FORMATS = {"e2m1": 0, "e4m3": 1, "e8m0": 2, "f32": 3}
_P, _I64, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class CAngles(ctypes.Structure):
    """`struct angles`."""

    _fields_ = (("cos", _P), ("sin", _P), ("channels", _I64))


class CSite(ctypes.Structure):
    """`struct site`."""

    _fields_ = (
        ("projection", CWeight),
        ("base", _P),
        ("scale", _P),
        ("norm", _P),
        ("streams", _I64),
        ("channels", _I64),
        ("iterations", _I64),
        ("eps", _F),
        ("norm_eps", _F),
    )


class CCoefficients(ctypes.Structure):
    """`struct coefficients`."""

    _fields_ = (("pre", _P), ("post", _P), ("mix", _P))


class CExpert(ctypes.Structure):
    """`struct expert`."""

    _fields_ = (("gate", CWeight), ("up", CWeight), ("down", CWeight))


class CMixture(ctypes.Structure):
    """`struct mixture`."""

    _fields_ = (
        ("router", CWeight),
        ("bias", _P),
        ("image_bias", _P),
        ("experts", _P),
        ("channels", _I64),
        ("columns", _I64),
        ("inner", _I64),
        ("k", _I64),
        ("limit", _F),
        ("scale", _F),
    )


class CQueries(ctypes.Structure):
    """`struct queries`."""

    _fields_ = (
        ("latent", CWeight),
        ("head_weights", CWeight),
        ("query", CWeight),
        ("index_query", CWeight),
        ("norm", _P),
        ("head_norm", _P),
        ("columns", _I64),
        ("latent_columns", _I64),
        ("d", _I64),
        ("index_d", _I64),
        ("index_scale", _F),
        ("eps", _F),
    )


class CEntries(ctypes.Structure):
    """`struct entries`."""

    _fields_ = (
        ("pool", _P),
        ("index", _P),
        ("counts", _P),
        ("rows", _I64),
        ("width", _I64),
        ("index_stride", _I64),
        ("first", _I64),
    )


class COutput(ctypes.Structure):
    """`struct output`."""

    _fields_ = (("groups", _P), ("whole", CWeight), ("num_groups", _I64), ("columns", _I64))


class CRecord(ctypes.Structure):
    """`struct record`."""

    _fields_ = (
        ("channels", _I64),
        ("rotary", _I64),
        ("group", _I64),
        ("width", _I64),
        ("codes", ctypes.c_int32),
        ("scales", ctypes.c_int32),
        ("largest", _F),
        ("least", _F),
    )


def c_record(layout: RecordLayout) -> CRecord:
    require(layout.group > 0, f"layout.group is {layout.group}; the kernel takes 2 and more")
    for name, size in (("channels", layout.channels), ("rotary", layout.rotary), ("width", layout.width)):
        require(size >= 0, f"layout.{name} is {size}, which is negative")
    code_bytes = layout.channels // 2 if layout.codes == "e2m1" else layout.channels
    scale_bytes = layout.channels // layout.group * (4 if layout.scales == "f32" else 1)
    check_multiple("layout.channels", layout.channels, layout.group)
    check_multiple("layout.group", layout.group, 2)
    require(code_bytes + 2 * layout.rotary + scale_bytes <= layout.width, "layout.width is too small")
    return CRecord(
        layout.channels, layout.rotary, layout.group, layout.width, _FORMATS[layout.codes],
        _FORMATS[layout.scales], layout.largest, layout.least,
    )  # fmt: skip


def c_site(site: HyperSite) -> CSite:
    n, c = site.streams, len(site.norm)
    rows = n * (n + 2)
    require(1 <= n <= MAX_STREAMS, f"site.streams is {n}; the kernel takes 1 to {MAX_STREAMS}")
    check_multiple("channels", c, LANES)
    projection = _weight("site.projection", site.projection, rows, n * c, packed=False)
    addresses = (
        check_rows("site.base", site.base, rows),
        check_rows("site.scale", site.scale, rows),
        check_rows("site.norm", site.norm, c),
    )
    return CSite(projection, *addresses, n, c, site.iterations, site.eps, site.norm_eps)


class MixtureStructure:
    """Keeps the experts' structures alive beside the one that points to them."""

    def __init__(self, mixture: Mixture) -> None:
        num_experts, columns, inner = (
            mixture.router.rows,
            mixture.router.columns,
            mixture.experts[0].gate.rows,
        )
        c = mixture.channels
        require(len(mixture.experts) == num_experts + 1, "experts: the shared one follows the router's")
        require(0 < mixture.k <= num_experts, f"k is {mixture.k}, of {num_experts} experts")
        check_multiple("channels", c, LANES)
        check_multiple("inner channels", inner, LANES)
        require(columns - c in range(BLOCK), f"the router has {columns} columns, the rows {c} channels")
        self._experts = (CExpert * len(mixture.experts))(*(
            CExpert(
                _weight("expert.gate", e.gate, inner, columns), _weight("expert.up", e.up, inner, columns),
                _weight("expert.down", e.down, c, inner),
            )
            for e in mixture.experts
        ))  # fmt: skip
        self.value = CMixture(
            _weight("router", mixture.router, num_experts, columns, packed=False),
            check_rows("bias", mixture.bias, num_experts),
            check_rows("image_bias", mixture.image_bias, num_experts), ctypes.addressof(self._experts), c,
            columns, inner, mixture.k, mixture.limit, mixture.scale,
        )  # fmt: skip


class OutputStructure:
    """Keeps the groups' structures alive beside the one that points to them."""

    def __init__(self, weights: OutputWeights) -> None:
        first = weights.groups[0]
        self.columns, self.rows = len(weights.groups) * first.columns, weights.whole.rows
        self._groups = (CWeight * len(weights.groups))(*(
            _weight("group", w, first.rows, first.columns) for w in weights.groups
        ))  # fmt: skip
        whole = _weight("whole", weights.whole, self.rows, len(weights.groups) * first.rows)
        self.value = COutput(ctypes.addressof(self._groups), whole, len(weights.groups), first.columns)


def c_queries(weights: QueryWeights) -> CQueries:
    """Without the addresses of outputs."""
    latent, query, d = weights.latent, weights.query, weights.head_channels
    check_multiple("latent rows", latent.rows, LANES)
    check_multiple("head channels", d, LANES)
    check_multiple("query rows", query.rows, d)
    require(query.columns - latent.rows in range(BLOCK), "query: its columns are not the latent's rows")
    head_norm = None if weights.head_norm is None else check_rows("head_norm", weights.head_norm, d)
    head_weights = index_query = CWeight()
    if weights.index_query is not None and weights.head_weights is not None:
        rows = weights.index_query.rows
        check_multiple("index_query rows", rows, weights.index_channels)
        index_query = _weight("index_query", weights.index_query, rows, query.columns)
        head_weights = _weight(
            "head_weights", weights.head_weights, rows // weights.index_channels, latent.columns
        )
    return CQueries(
        _weight("latent", latent, latent.rows, latent.columns), head_weights,
        _weight("query", query, query.rows, query.columns), index_query,
        check_rows("norm", weights.norm, latent.rows), head_norm, latent.columns, query.columns, d,
        weights.index_channels, weights.index_scale, weights.eps,
    )  # fmt: skip


def c_entries(source: EntrySource, rows: int, channels: int) -> CEntries:
    """C checks each place against the pool, and each count against the width."""
    index, counts, num_entries = source.index, source.counts, source.pool.shape[0]
    pool = check_rows("pool", source.pool, num_entries, channels)
    width, shared = index.shape[-1], index.dim() == 1
    if index.dtype is not torch.int64 or not (shared or index.shape == (rows, width)):
        raise ValueError(f"index: {index.dtype} {list(index.shape)}; int64 [{rows}, {width}] or [{width}]")
    if width > 1 and index.stride(-1) != 1:
        raise ValueError("index: a row's places are not neighbours")
    require(is_plain(index), f"index: on {index.device}, or a negative view; the kernel takes plain memory")
    require(source.first >= 0, f"first is {source.first}, which is negative")
    stride = 0 if shared else index.stride(0)
    address = None if counts is None else check_tensor("counts", counts, (rows,), torch.int64)
    return CEntries(pool, index.data_ptr(), address, num_entries, width, stride, source.first)


def c_angles(rotation: Rotation, rows: int, channels: int) -> CAngles:
    """Of `rows` rows; at most so many channels."""
    check_angles(rotation, rows, channels)
    rotary = rotation.cos.shape[1]
    cos, sin = check_rows("cos", rotation.cos, rows, rotary), check_rows("sin", rotation.sin, rows, rotary)
    return CAngles(cos, sin, rotary)


def check_angles(rotation: Rotation, rows: int, channels: int) -> None:
    """As many rows, and pairs that a head of so many channels has. Raises ValueError."""
    found, rotary = rotation.cos.shape
    if found != rows or rotary > channels or rotary % 2:
        raise ValueError(
            f"rotation: {rotary} channels of {found} rows, for {rows} rows of heads of {channels} channels"
        )


def _weight(name: str, weight: Weight, rows: int, columns: int, *, packed: bool = True) -> CWeight:
    """Raises ValueError; `packed`: whether it may be."""
    require(weight.rows == rows, f"{name}: {weight.rows} rows, expected {rows}")
    require(packed or not weight.packed, f"{name}: is multiplied in floats, and not prepared")
    check_weight(weight, columns, name)
    return c_weight(weight, None)
