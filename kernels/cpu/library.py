"""The C library's functions with their argument types: the one place that knows the ABI."""

import ctypes
from functools import lru_cache
from pathlib import Path

from kernels.cpu.build import library_path


class CWeight(ctypes.Structure):
    """`struct weight` of weight.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
        ("format", ctypes.c_int32),
        ("packed", ctypes.c_int32),
    )


class CPaging(ctypes.Structure):
    """`struct paging` of operations.h."""

    _fields_ = (
        ("cache", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("sequences", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("width", ctypes.c_int64),
        ("block", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("d", ctypes.c_int64),
    )


class CLayer(ctypes.Structure):
    """`struct layer` of operations.h."""

    _fields_ = (
        ("attention_norm", ctypes.c_void_p),
        ("feed_forward_norm", ctypes.c_void_p),
        ("q", CWeight),
        ("k", CWeight),
        ("v", CWeight),
        ("output", CWeight),
        ("gate", CWeight),
        ("up", CWeight),
        ("down", CWeight),
    )


class CDecoder(ctypes.Structure):
    """`struct decoder` of operations.h."""

    _fields_ = (
        ("layers", ctypes.c_void_p),
        ("angles", ctypes.c_void_p),
        ("num_layers", ctypes.c_int64),
        ("channels", ctypes.c_int64),
        ("feed_forward", ctypes.c_int64),
        ("norm_eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    )


_P, _I32, _I64, _F = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "dockyard_linear": (_I32, (_P, _I32, _P, _I64, _I64, _I32)),
    "dockyard_gather": (None, (_P, _I64, _I32, _P, _I64, _I64, _P)),
    "dockyard_rms_norm": (None, (_P, _P, _F, _I64, _I64, _P, _I32)),
    "dockyard_rope": (None, (_P, _P, _P, _I64, _I64, _I64, _I32)),
    "dockyard_silu_mul": (None, (_P, _P, _I64, _I32)),
    "dockyard_paged_attention": (_I32, (_P, _P, _I64, _F, _P, _I32)),
    "dockyard_store_kv": (None, (_P, _P, _P, _I64)),
    "dockyard_decode": (_I32, (_P, _P, _I64, _P, _I64, _I32)),
    "dockyard_hyper_site": (_I32, (_P, _P, _P, _I64, _P, _P, _I32)),
    "dockyard_hyper_spread": (_I32, (_P, _P, _P, _P, _I64, _I64, _I64, _P, _I32)),
    "dockyard_mixture": (_I32, (_P, _P, _P, _P, _I64, _P, _I32)),
    "dockyard_keys": (_I32, (_P, _I32, _P, _I64, _I64, _P, _F, _P, _I32)),
    "dockyard_queries": (_I32, (_P, _P, _I64, _P, _I32)),
    "dockyard_attend": (_I32, (_P, _I32, _P, _I64, _I64, _I64, _P, _F, _P, _P, _I32)),
    "dockyard_grouped_output": (_I32, (_P, _P, _I64, _P, _I32)),
    "dockyard_index_scores": (_I32, (_P, _P, _P, _I64, _P, _P, _I64, _I64, _I64, _I64, _P, _I32)),
    "dockyard_encode": (None, (_P, _P, _I64, _P, _I32)),
    "dockyard_decode_record": (None, (_P, _P, _I64, _P, _I32)),
    "dockyard_top_k": (_I32, (_P, _I64, _I64, _I64, _P, _I32)),
}


def available() -> bool:
    """Whether the library for this processor has been built."""
    return library_path().exists()


@lru_cache(maxsize=1)
def load() -> ctypes.CDLL:
    """The library with its signatures set. Raises OSError when it has not been built."""
    return open_library(library_path())


def open_library(path: Path) -> ctypes.CDLL:
    """The library at a path, its signatures set."""
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
