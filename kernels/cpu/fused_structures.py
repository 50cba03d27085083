"""What is in `kernels.fused` as C reads it (deepseek.h), with lengths and types asserted: C trusts them."""

import ctypes

import torch
from torch import Tensor

from kernels.cpu.library import CWeight
from kernels.cpu.structures import c_weight, check_weight
from kernels.fused import (
    LANES,
    MAX_STREAMS,
    EntrySource,
    HyperSite,
    Mixture,
    OutputWeights,
    QueryWeights,
    RecordLayout,
    Rotation,
)
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
    code_bytes = layout.channels // 2 if layout.codes == "e2m1" else layout.channels
    scale_bytes = layout.channels // layout.group * (4 if layout.scales == "f32" else 1)
    assert layout.channels % layout.group == layout.group % 2 == 0
    assert code_bytes + 2 * layout.rotary + scale_bytes <= layout.width
    return CRecord(
        layout.channels, layout.rotary, layout.group, layout.width, _FORMATS[layout.codes],
        _FORMATS[layout.scales], layout.largest, layout.least,
    )  # fmt: skip


def c_site(site: HyperSite) -> CSite:
    n, c = site.streams, len(site.norm)
    assert 1 <= n <= MAX_STREAMS
    assert c % LANES == 0
    assert site.projection.rows == n * (n + 2)
    addresses = (
        _floats(site.base, n * (n + 2)), _floats(site.scale, n * (n + 2)), _floats(site.norm, c)
    )  # fmt: skip
    assert not site.projection.packed
    projection = _weight(site.projection, n * c)
    return CSite(projection, *addresses, n, c, site.iterations, site.eps, site.norm_eps)


class MixtureStructure:
    """Keeps the experts' structures alive beside the one that points to them."""

    def __init__(self, mixture: Mixture) -> None:
        num_experts, columns, inner = (
            mixture.router.rows,
            mixture.router.columns,
            mixture.experts[0].gate.rows,
        )
        assert not mixture.router.packed
        assert len(mixture.experts) == num_experts + 1
        assert 0 < mixture.k <= num_experts
        assert mixture.channels % LANES == inner % LANES == 0
        assert columns - mixture.channels in range(32)
        for expert in mixture.experts:
            assert expert.gate.rows == expert.up.rows == expert.down.columns == inner
            assert expert.down.rows == mixture.channels
        self._experts = (CExpert * len(mixture.experts))(*(
            CExpert(_weight(e.gate, columns), _weight(e.up, columns), _weight(e.down, inner))
            for e in mixture.experts
        ))  # fmt: skip
        self.value = CMixture(
            _weight(mixture.router, columns), _floats(mixture.bias, num_experts),
            _floats(mixture.image_bias, num_experts), ctypes.addressof(self._experts), mixture.channels,
            columns, inner, mixture.k, mixture.limit, mixture.scale,
        )  # fmt: skip


class OutputStructure:
    """Keeps the groups' structures alive beside the one that points to them."""

    def __init__(self, weights: OutputWeights) -> None:
        first = weights.groups[0]
        assert all(w.rows == first.rows for w in weights.groups)
        self.columns, self.rows = len(weights.groups) * first.columns, weights.whole.rows
        self._groups = (CWeight * len(weights.groups))(*(_weight(w, first.columns) for w in weights.groups))
        whole = _weight(weights.whole, len(weights.groups) * first.rows)
        self.value = COutput(ctypes.addressof(self._groups), whole, len(weights.groups), first.columns)


def c_queries(weights: QueryWeights) -> CQueries:
    """Without the addresses of outputs."""
    latent, query, d = weights.latent, weights.query, weights.head_channels
    assert latent.rows % LANES == d % LANES == query.rows % d == 0
    assert query.columns - latent.rows in range(32)
    head_norm = None if weights.head_norm is None else _floats(weights.head_norm, d)
    head_weights = index_query = CWeight()
    if weights.index_query is not None and weights.head_weights is not None:
        assert weights.index_query.rows % weights.index_channels == 0
        index_query = _weight(weights.index_query, query.columns)
        head_weights = _weight(weights.head_weights, latent.columns)
    return CQueries(
        _weight(latent, latent.columns), head_weights, _weight(query, query.columns), index_query,
        _floats(weights.norm, latent.rows), head_norm, latent.columns, query.columns, d,
        weights.index_channels, weights.index_scale, weights.eps,
    )  # fmt: skip


def c_entries(source: EntrySource, rows: int, channels: int) -> CEntries:
    pool, index, counts = source.pool, source.index, source.counts
    assert pool.dtype == torch.float32
    assert index.dtype == torch.int64
    assert pool.is_contiguous()
    assert pool.shape[1] == channels
    assert index.stride(-1) == 1 or index.shape[-1] <= 1
    stride = index.stride(0) if index.dim() == 2 else 0
    assert index.dim() == 1 or index.shape[0] == rows
    if counts is not None:
        assert counts.dtype == torch.int64
        assert counts.shape == (rows,)
        assert counts.is_contiguous()
    address = None if counts is None else counts.data_ptr()
    width = index.shape[-1]
    return CEntries(
        pool.data_ptr(), index.data_ptr(), address, pool.shape[0], width, stride, source.first
    )  # fmt: skip


def c_angles(rotation: Rotation, rows: int, channels: int) -> CAngles:
    """Of `rows` rows; at most so many channels."""
    cos, sin = rotation.cos, rotation.sin
    assert cos.shape == sin.shape
    assert cos.shape[0] == rows
    assert cos.shape[1] <= channels
    assert cos.dtype == sin.dtype == torch.float32
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    return CAngles(cos.data_ptr(), sin.data_ptr(), cos.shape[1])


def check_rows(x: Tensor, *shape: int) -> int:
    """The address of contiguous float32 rows of that shape."""
    assert x.shape == shape, (x.shape, shape)
    assert x.dtype == torch.float32
    assert x.is_contiguous()
    return x.data_ptr()


def _floats(x: Tensor, count: int) -> int:
    return check_rows(x, count)


def _weight(weight: Weight, columns: int) -> CWeight:
    check_weight(weight, columns)
    return c_weight(weight, None)
