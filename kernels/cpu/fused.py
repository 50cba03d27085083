"""`FusedOperations` on the C library. Tensors are contiguous float32 on the CPU."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from kernels.cpu.fused_structures import (
    CAngles,
    CCoefficients,
    CEntries,
    CSite,
    MixtureStructure,
    OutputStructure,
    c_angles,
    c_entries,
    c_queries,
    c_record,
    c_site,
    check_angles,
)
from kernels.cpu.library import CWeight
from kernels.cpu.structures import (
    c_weight,
    check_multiple,
    check_rows,
    check_status,
    check_tensor,
    check_weight,
    require,
)
from kernels.fused import (
    LANES,
    EntrySource,
    HyperSite,
    KeyWeights,
    Mixture,
    OutputWeights,
    QueryRows,
    QueryWeights,
    RecordLayout,
    Rotation,
    SiteRows,
)
from kernels.limits import MAX_STREAMS

_W = TypeVar("_W")
_S = TypeVar("_S")
_FEW = 3


class CpuFused:
    """Structures of weights are made at their first use, and keep the weights alive."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self._library, self._threads = library, threads
        self._structures: dict[object, Any] = {}
        self._rotations: list[tuple[Rotation, CAngles]] = []  # those of the newest calls

    def site(self, site: HyperSite, x_TNC: Tensor, premix_TN: Tensor | None) -> SiteRows:
        structure: CSite = self._structure(site, c_site)
        rows, n, c = x_TNC.shape
        x = check_rows("x", x_TNC, rows, site.streams, site.norm.shape[0])
        premix = None if premix_TN is None else check_rows("premix", premix_TN, rows, n)
        to = SiteRows(
            torch.empty(rows, n), torch.empty(rows, n), torch.empty(rows, n, n), torch.empty(rows, c)
        )
        out = CCoefficients(to.pre.data_ptr(), to.post.data_ptr(), to.mix.data_ptr())
        check_status(
            self._library.dockyard_hyper_site(
                ctypes.byref(structure), x, premix, rows, ctypes.byref(out), to.normed.data_ptr(),
                self._threads,
            )
        )  # fmt: skip
        return to

    def spread(self, x_TNC: Tensor, y_TC: Tensor, post_TN: Tensor, mix_TNN: Tensor) -> Tensor:
        t, n, c = x_TNC.shape
        check_multiple("channels", c, LANES)
        if not 1 <= n <= MAX_STREAMS:
            raise ValueError(f"x: {n} streams; the kernel takes 1 to {MAX_STREAMS}")
        out = torch.empty(t, n, c)
        check_status(
            self._library.dockyard_hyper_spread(
                check_rows("x", x_TNC, t, n, c), check_rows("y", y_TC, t, c),
                check_rows("post", post_TN, t, n), check_rows("mix", mix_TNN, t, n, n), t, n, c,
                out.data_ptr(), self._threads,
            )
        )  # fmt: skip
        return out

    def mixture(
        self, mixture: Mixture, x_TC: Tensor, chosen_TK: Tensor | None, image_T: Tensor | None
    ) -> Tensor:
        structure: MixtureStructure = self._structure(mixture, MixtureStructure)
        rows = x_TC.shape[0]
        x, out = check_rows("x", x_TC, rows, mixture.channels), torch.empty(rows, mixture.channels)
        chosen = image = None
        if chosen_TK is not None:
            chosen = check_tensor("chosen", chosen_TK, (rows, mixture.k), torch.int64)
        if image_T is not None:
            image = check_tensor("image", image_T, (rows,), torch.bool)
        check_status(
            self._library.dockyard_mixture(
                ctypes.byref(structure.value), x, chosen, image, rows, out.data_ptr(), self._threads,
            )
        )  # fmt: skip
        return out

    def keys(self, weights: KeyWeights, x_TK: Tensor, rotation: Rotation) -> list[Tensor]:
        array = self._structure(weights, _key_structures)
        rows, columns = x_TK.shape
        d = weights.weights[0].rows
        outs = [torch.empty(rows, weight.rows) for weight in weights.weights]
        for weight, out in zip(array, outs, strict=True):
            weight.out = out.data_ptr()
        x = check_rows("x", x_TK, rows, weights.weights[0].columns)
        angles = self._angles(rotation, rows, d)
        check_status(
            self._library.dockyard_keys(
                array, len(outs), x, rows, columns, weights.norm.data_ptr(), weights.eps,
                ctypes.byref(angles), self._threads,
            )
        )  # fmt: skip
        return outs

    def queries(self, weights: QueryWeights, x_TK: Tensor, rotation: Rotation) -> QueryRows:
        structure = self._structure(weights, c_queries)
        rows = x_TK.shape[0]
        x = check_rows("x", x_TK, rows, weights.latent.columns)
        narrowest = weights.head_channels
        if weights.index_query is not None:
            narrowest = min(narrowest, weights.index_channels)
        angles = self._angles(rotation, rows, narrowest)
        q, index_q, head_weights = torch.empty(rows, weights.query.rows), None, None
        structure.query.out = q.data_ptr()
        if weights.index_query is not None and weights.head_weights is not None:
            index_q = torch.empty(rows, weights.index_query.rows)
            head_weights = torch.empty(rows, weights.head_weights.rows)
            structure.index_query.out = index_q.data_ptr()
            structure.head_weights.out = head_weights.data_ptr()
        check_status(
            self._library.dockyard_queries(
                ctypes.byref(structure), x, rows, ctypes.byref(angles), self._threads
            )
        )
        return QueryRows(q, index_q, head_weights)

    def attend(
        self,
        q_THD: Tensor,
        entries: Sequence[EntrySource],
        sink_H: Tensor,
        scale: float,
        rotation: Rotation | None,
    ) -> Tensor:
        rows, heads, d = q_THD.shape
        q, out = check_rows("q", q_THD, rows, heads, d), torch.empty(rows, heads, d)
        check_multiple("head channels", d, LANES)
        sources = (CEntries * len(entries))(*(c_entries(source, rows, d) for source in entries))
        angles = None if rotation is None else ctypes.byref(self._angles(rotation, rows, d))
        check_status(
            self._library.dockyard_attend(
                sources, len(entries), q, rows, heads, d, check_rows("sinks", sink_H, heads), scale, angles,
                out.data_ptr(), self._threads,
            )
        )  # fmt: skip
        return out

    def output(self, weights: OutputWeights, x_TK: Tensor) -> Tensor:
        structure: OutputStructure = self._structure(weights, OutputStructure)
        rows = x_TK.shape[0]
        out = torch.empty(rows, structure.rows)
        check_status(
            self._library.dockyard_grouped_output(
                ctypes.byref(structure.value), check_rows("x", x_TK, rows, structure.columns), rows,
                out.data_ptr(), self._threads,
            )
        )  # fmt: skip
        return out

    def index_scores(
        self, q_TIJ: Tensor, weights_TI: Tensor, pool_PJ: Tensor, keys_N: Tensor, visible_T: Tensor
    ) -> Tensor:
        rows, heads, d = q_TIJ.shape
        pool_rows, count = pool_PJ.shape[0], keys_N.shape[0]
        check_multiple("head channels", d, LANES)
        out = torch.empty(rows, count)
        check_status(
            self._library.dockyard_index_scores(
                check_rows("q", q_TIJ, rows, heads, d), check_rows("weights", weights_TI, rows, heads),
                check_rows("pool", pool_PJ, pool_rows, d), pool_rows,
                check_tensor("keys", keys_N, (count,), torch.int64),
                check_tensor("visible", visible_T, (rows,), torch.int64), rows, heads, d, count,
                out.data_ptr(), self._threads,
            )
        )  # fmt: skip
        return out

    def encode(self, layout: RecordLayout, x: Tensor) -> Tensor:
        structure, x = self._structure(layout, c_record), x.contiguous()
        rows = x.shape[:-1].numel()
        address = check_rows("x", x, *x.shape[:-1], layout.channels + layout.rotary)
        out = torch.empty(*x.shape[:-1], layout.width, dtype=torch.uint8)
        self._library.dockyard_encode(ctypes.byref(structure), address, rows, out.data_ptr(), self._threads)
        return out

    def decode(self, layout: RecordLayout, stored: Tensor) -> Tensor:
        structure, stored = self._structure(layout, c_record), stored.contiguous()
        address = check_tensor("stored", stored, (*stored.shape[:-1], layout.width), torch.uint8)
        out = torch.empty(*stored.shape[:-1], layout.channels + layout.rotary)
        self._library.dockyard_decode_record(
            ctypes.byref(structure), address, stored.shape[:-1].numel(), out.data_ptr(), self._threads
        )  # fmt: skip
        return out

    def top_k(self, scores_TN: Tensor, k: int) -> Tensor:
        rows, count = scores_TN.shape
        require(k >= 0, "k is negative")
        out = torch.empty(rows, k, dtype=torch.int64)
        check_status(
            self._library.dockyard_top_k(
                check_rows("scores", scores_TN, rows, count), rows, count, k, out.data_ptr(), self._threads
            )
        )
        return out

    def _angles(self, rotation: Rotation, rows: int, channels: int) -> CAngles:
        """All layers of a step rotate by the same few."""
        for known, structure in self._rotations:
            if known is rotation:
                check_angles(known, rows, channels)
                return structure
        structure = c_angles(rotation, rows, channels)
        self._rotations = [(rotation, structure), *self._rotations[:_FEW]]
        return structure

    def _structure(self, weights: _W, make: Callable[[_W], _S]) -> _S:
        known = self._structures.get(weights)
        if known is None:
            known = self._structures[weights] = make(weights)
        return known


def _key_structures(weights: KeyWeights) -> Any:
    first = weights.weights[0]
    check_multiple("keys' channels", first.rows, LANES)
    check_rows("norm", weights.norm, first.rows)
    for weight in weights.weights:
        check_weight(weight, first.columns)
    return (CWeight * len(weights.weights))(*(c_weight(weight, None) for weight in weights.weights))
