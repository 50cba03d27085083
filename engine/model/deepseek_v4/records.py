"""V4's cache records beside V4.1's (section 3): FP8 with rotary channels apart, and FP8 index keys.

Shapes: ... leading dimensions, C channels of an entry, R of them rotary, the last ones.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.deepseek.quantisation import (
    E4M3_MAX,
    e4m3_bytes,
    e4m3_values,
    e8m0_values,
    in_groups,
    largest_in_groups,
    power_of_two_scales,
)
from engine.model.deepseek.records import IndexRecord, PlainRecord, Record, Records
from engine.model.deepseek_v4.config import DeepseekV4Config
from engine.model.deepseek_v4.config_checks import FP8_GROUP
from kernels.fused import RecordLayout

_LEAST = 1e-4  # of the largest magnitude that a scale comes from
_ALIGNMENT = 8  # bytes
_BFLOAT16, _FLOAT32 = 2, 4


@dataclass(frozen=True, slots=True)
class SplitRecord:
    """C - R bytes E4M3, 2R bytes bfloat16, (C - R)/64 bytes E8M0, zeros to a multiple of 8: 584 at 512, 64.

    The scale is 2^ceil(log2(max(amax, 1e-4) / 448)).
    """

    channels: int
    rotary: int
    dtype = torch.uint8

    @property
    def plain(self) -> int:
        return self.channels - self.rotary

    @property
    def width(self) -> int:
        used = self.plain + self.rotary * _BFLOAT16 + self.plain // FP8_GROUP
        return used + -used % _ALIGNMENT

    @property
    def layout(self) -> RecordLayout:
        return RecordLayout(
            self.plain, FP8_GROUP, self.width, "e4m3", "e8m0", E4M3_MAX, _LEAST, rotary=self.rotary
        )

    def encode(self, x: Tensor) -> Tensor:
        codes, scales = _to_fp8(x[..., : self.plain], FP8_GROUP)
        tail = x[..., self.plain :]
        narrow = tail.to(torch.bfloat16).masked_fill_(tail.isnan(), torch.nan)  # one NaN of the many
        rotary = narrow.contiguous().view(torch.uint8)
        used = torch.cat((codes, rotary, scales), -1)
        return torch.nn.functional.pad(used, (0, self.width - used.shape[-1]))

    def decode(self, stored: Tensor) -> Tensor:
        scales_at = self.plain + self.rotary * _BFLOAT16
        scales = stored[..., scales_at : scales_at + self.plain // FP8_GROUP]
        values = in_groups(e4m3_values(stored[..., : self.plain].contiguous()), FP8_GROUP)
        plain = (values * e8m0_values(scales).unsqueeze(-1)).flatten(-2)
        rotary = stored[..., self.plain : scales_at].contiguous().view(torch.bfloat16).float()
        return torch.cat((plain, rotary), -1)


@dataclass(frozen=True, slots=True)
class Fp8IndexRecord:
    """C bytes E4M3, then one float32 scale, a power of two: 132 at 128. Index queries round-trip too."""

    channels: int
    dtype = torch.uint8

    @property
    def width(self) -> int:
        return self.channels + _FLOAT32

    @property
    def layout(self) -> RecordLayout:
        return RecordLayout(self.channels, self.channels, self.width, "e4m3", "f32", E4M3_MAX, _LEAST)

    def encode(self, x: Tensor) -> Tensor:
        codes, scales = _to_fp8(x, self.channels)
        return torch.cat((codes, e8m0_values(scales).contiguous().view(torch.uint8)), -1)

    def decode(self, stored: Tensor) -> Tensor:
        scales = stored[..., self.channels :].contiguous().view(torch.float32)
        return e4m3_values(stored[..., : self.channels].contiguous()) * scales


def v4_records(config: DeepseekV4Config) -> Records:
    """The records of a model's three caches."""
    on, plain = config.quantisation, PlainRecord(config.head_dim)
    split = SplitRecord(config.head_dim, config.qk_rope_head_dim)
    return Records(split if on.window else plain, split if on.main else plain, _index_record(config))


def _index_record(config: DeepseekV4Config) -> Record:
    width = config.index_head_dim
    match config.quantisation.index:
        case "mxfp4":
            return IndexRecord(width)
        case "fp8":
            return Fp8IndexRecord(width)
        case "float32":
            return PlainRecord(width)


def _to_fp8(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """E4M3 bytes [..., C] and the E8M0 bytes [..., C / group] of their scales."""
    grouped = in_groups(x, group)
    scales = power_of_two_scales(largest_in_groups(grouped).clamp(min=_LEAST), E4M3_MAX)
    codes = e4m3_bytes(grouped * e8m0_values(254 - scales))  # 254 - byte is the reciprocal's
    return codes.flatten(-2), scales.flatten(-2)
