"""The number formats of caches and weights: E2M1, E4M3 and E8M0 (fact sheet, sections 3 and 4).

Shapes: ... leading dimensions, C channels, G groups of channels. Every function is exact or rounds once, to
nearest with ties to the even code, so that a value's code depends on its group alone.
"""

import torch
from torch import Tensor

E4M3_MAX, E2M1_MAX = 448.0, 6.0
_E4M3_NAN, _E8M0_NAN = 127, 255

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = torch.tensor([*_MAGNITUDES, *(-m for m in _MAGNITUDES)])  # by code: bit 3 is the sign
_BYTES = torch.arange(256)
_E2M1_PAIRS = torch.stack((_E2M1[_BYTES & 15], _E2M1[_BYTES >> 4]), -1)  # by byte: even channel, odd channel
_E8M0 = torch.pow(2.0, torch.arange(256, dtype=torch.float64) - 127).float()  # by byte; 255 is NaN
_E8M0[_E8M0_NAN] = float("nan")

# Between two codes a tie goes to the even one: to the smaller magnitude at 0.25, 1.25, 2.5 and 5.0 (a bound
# that a value must exceed), to the larger at 0.75, 1.75 and 3.5 (the next float below is the bound).
_UP = torch.nextafter(torch.tensor([0.75, 1.75, 3.5]), torch.zeros(3))
_BOUNDS = torch.tensor([0.25, float(_UP[0]), 1.25, float(_UP[1]), 2.5, float(_UP[2]), 5.0])


def e2m1_codes(x: Tensor) -> Tensor:
    """uint8 codes 0..15 of float32 values, the nearest each; beyond 6 the largest, of NaN 0."""
    magnitude = torch.bucketize(x.abs(), _BOUNDS, out_int32=True)
    return (magnitude + 8 * (x < 0)).masked_fill_(x.isnan(), 0).to(torch.uint8)


def e2m1_values(codes: Tensor) -> Tensor:
    """float32 values of codes 0..15."""
    return _E2M1[codes.long()]


def pack_e2m1(codes: Tensor) -> Tensor:
    """Codes [..., C] in bytes [..., C/2]: channel 2i in the low nibble, 2i+1 in the high one."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """float32 values [..., C] of bytes [..., C/2]."""
    return _E2M1_PAIRS[packed.long()].flatten(-2)


def e4m3_bytes(x: Tensor) -> Tensor:
    """uint8 codes of float32 values, the nearest each; beyond 448 the largest, of NaN 127."""
    codes = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill_(x.isnan(), _E4M3_NAN)


def e4m3_values(codes: Tensor) -> Tensor:
    """float32 values of E4M3 bytes."""
    return codes.view(torch.float8_e4m3fn).float()


def e8m0_values(codes: Tensor) -> Tensor:
    """float32 powers of two of E8M0 bytes: 2^(byte - 127)."""
    return _E8M0[codes.long()]


def ceil_log2(x: Tensor) -> Tensor:
    """The smallest e with x <= 2^e as int32, exact; x is positive and normal (section 4)."""
    bits = x.view(torch.int32)
    return (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0)


def power_of_two_scales(amax: Tensor, largest: float) -> Tensor:
    """E8M0 bytes of the scales that bring `amax` to at most `largest` of a format.

    The quotient is a product with the float32 reciprocal, as the released kernels take it ("Refinements" 4).
    Of NaN it is NaN's byte, and so the whole group is NaN.
    """
    reciprocal = torch.tensor(1.0, dtype=torch.float32) / largest
    bytes_ = (ceil_log2(amax * reciprocal) + 127).clamp(0, 254)
    return bytes_.masked_fill_(amax.isnan(), _E8M0_NAN).to(torch.uint8)


def in_groups(x: Tensor, channels: int) -> Tensor:
    """[..., C] as [..., G, channels]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // channels, channels)


def largest_in_groups(grouped: Tensor) -> Tensor:
    """max |x| over the last dimension, which it keeps."""
    return grouped.abs().amax(-1, keepdim=True)
