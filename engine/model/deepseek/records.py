"""How one entry of a cache lies in memory: the three released records, and plain float32 (section 3).

A record turns float32 [..., C] into stored rows [..., width] and back; `decode(encode(x))` is the value that
attention reads, of the current token too. Where operations do it in one call, `encode` and `decode` of this
file take that, to the same bits; a record's own methods are the definition.
Shapes: ... leading dimensions, C channels.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.model.deepseek.config import DeepseekConfig
from engine.model.deepseek.config_checks import INDEX_GROUP, MAIN_GROUP, WINDOW_GROUP
from engine.model.deepseek.quantisation import (
    E2M1_MAX,
    E4M3_MAX,
    e2m1_codes,
    e4m3_bytes,
    e4m3_values,
    e8m0_values,
    in_groups,
    largest_in_groups,
    pack_e2m1,
    power_of_two_scales,
    unpack_e2m1,
)
from kernels.fused import RecordLayout
from kernels.operations import Operations

_LEAST_WINDOW, _LEAST_MAIN_SCALE, _LEAST_INDEX = 1e-4, 2.0**-9, 6 * 2.0**-126


class Record(Protocol):
    """Immutable. `channels` float32 values take `width` elements of `dtype`."""

    @property
    def channels(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def layout(self) -> RecordLayout | None:
        """None for what is stored as it is."""
        ...

    def encode(self, x: Tensor) -> Tensor: ...

    def decode(self, stored: Tensor) -> Tensor: ...


def encode(operations: Operations, record: Record, x: Tensor) -> Tensor:
    """`record.encode(x)`."""
    fused, layout = operations.fused, record.layout
    return record.encode(x) if fused is None or layout is None else fused.encode(layout, x)


def decode(operations: Operations, record: Record, stored: Tensor) -> Tensor:
    """`record.decode(stored)`."""
    fused, layout = operations.fused, record.layout
    return record.decode(stored) if fused is None or layout is None else fused.decode(layout, stored)


@dataclass(frozen=True, slots=True)
class PlainRecord:
    """float32 as it is: a cache whose quantisation is off."""

    channels: int
    dtype = torch.float32
    layout = None

    @property
    def width(self) -> int:
        return self.channels

    def encode(self, x: Tensor) -> Tensor:
        return x

    def decode(self, stored: Tensor) -> Tensor:
        return stored


@dataclass(frozen=True, slots=True)
class WindowRecord:
    """C bytes E4M3, then C/32 bytes E8M0: 528 at 512 channels.

    The scale is 2^ceil(log2(max(amax, 1e-4) / 448)).
    """

    channels: int
    dtype = torch.uint8

    @property
    def width(self) -> int:
        return self.channels + self.channels // WINDOW_GROUP

    @property
    def layout(self) -> RecordLayout:
        return RecordLayout(self.channels, WINDOW_GROUP, self.width, "e4m3", "e8m0", E4M3_MAX, _LEAST_WINDOW)

    def encode(self, x: Tensor) -> Tensor:
        grouped = in_groups(x, WINDOW_GROUP)
        scales = power_of_two_scales(largest_in_groups(grouped).clamp(min=_LEAST_WINDOW), E4M3_MAX)
        codes = e4m3_bytes(grouped * e8m0_values(254 - scales))  # 254 - byte is the reciprocal's
        return torch.cat((codes.flatten(-2), scales.flatten(-2)), -1)

    def decode(self, stored: Tensor) -> Tensor:
        values = in_groups(e4m3_values(stored[..., : self.channels]), WINDOW_GROUP)
        return (values * e8m0_values(stored[..., self.channels :]).unsqueeze(-1)).flatten(-2)


@dataclass(frozen=True, slots=True)
class MainRecord:
    """C/2 bytes E2M1 pairs, then C/16 bytes E4M3: 288 at 512 channels.

    The scale is E4M3(clamp(amax / 6, 2^-9, 448)), and there is none above it.
    """

    channels: int
    dtype = torch.uint8

    @property
    def width(self) -> int:
        return self.channels // 2 + self.channels // MAIN_GROUP

    @property
    def layout(self) -> RecordLayout:
        return RecordLayout(
            self.channels, MAIN_GROUP, self.width, "e2m1", "e4m3", E2M1_MAX, _LEAST_MAIN_SCALE
        )

    def encode(self, x: Tensor) -> Tensor:
        grouped = in_groups(x, MAIN_GROUP)
        scales = e4m3_bytes((largest_in_groups(grouped) / E2M1_MAX).clamp(min=_LEAST_MAIN_SCALE))
        codes = e2m1_codes(grouped / e4m3_values(scales)).flatten(-2)
        return torch.cat((pack_e2m1(codes), scales.flatten(-2)), -1)

    def decode(self, stored: Tensor) -> Tensor:
        half = self.channels // 2
        values = in_groups(unpack_e2m1(stored[..., :half]), MAIN_GROUP)
        return (values * e4m3_values(stored[..., half:]).unsqueeze(-1)).flatten(-2)


@dataclass(frozen=True, slots=True)
class IndexRecord:
    """MXFP4: C/2 bytes E2M1 pairs, then C/32 bytes E8M0: 68 at 128 channels. Index queries round-trip too.

    The scale is 2^ceil(log2(max(amax, 6 * 2^-126) / 6)).
    """

    channels: int
    dtype = torch.uint8

    @property
    def width(self) -> int:
        return self.channels // 2 + self.channels // INDEX_GROUP

    @property
    def layout(self) -> RecordLayout:
        return RecordLayout(self.channels, INDEX_GROUP, self.width, "e2m1", "e8m0", E2M1_MAX, _LEAST_INDEX)

    def encode(self, x: Tensor) -> Tensor:
        grouped = in_groups(x, INDEX_GROUP)
        scales = power_of_two_scales(largest_in_groups(grouped).clamp(min=_LEAST_INDEX), E2M1_MAX)
        codes = e2m1_codes(grouped * e8m0_values(254 - scales)).flatten(-2)
        return torch.cat((pack_e2m1(codes), scales.flatten(-2)), -1)

    def decode(self, stored: Tensor) -> Tensor:
        half = self.channels // 2
        values = in_groups(unpack_e2m1(stored[..., :half]), INDEX_GROUP)
        return (values * e8m0_values(stored[..., half:]).unsqueeze(-1)).flatten(-2)


@dataclass(frozen=True, slots=True)
class Records:
    """The records of a model's three caches."""

    window: Record
    main: Record
    index: Record

    @classmethod
    def of(cls, config: DeepseekConfig) -> "Records":
        on, d, d_index = config.quantisation, config.head_dim, config.index_head_dim
        return cls(
            WindowRecord(d) if on.window else PlainRecord(d),
            MainRecord(d) if on.main else PlainRecord(d),
            IndexRecord(d_index) if on.index else PlainRecord(d_index),
        )
