"""Rounding to the small formats in float64, which holds every quotient of float32 numbers well enough to round once."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_E2M1 = 6.0
LARGEST_E4M3 = 448.0
NAN_E8M0 = 255
LEAST_EXPONENT, BIAS_E8M0 = -127, 127


def power_of_two(exponent: Tensor) -> Tensor:
    """2 to an int64 exponent from -1022 to 1023, as float64: exact on every device."""
    return ((exponent + 1023) << 52).view(torch.float64)


def e2m1_codes(values: Tensor) -> Tensor:
    """float64 -> uint8 codes 0 to 15 of e2m1, to nearest even, saturating. NaN, which e2m1 has not, becomes 0."""
    size = values.abs().nan_to_num_(nan=0.0)
    # Steps of 1/2 below 2, of 1 below 4, of 2 above: rounding to even codes is rounding to even steps.
    steps = torch.where(size < 2, (2 * size).round(), torch.where(size < 4, 2 + size.round(), 4 + (size / 2).round()))
    codes = steps.clamp_max(7).to(torch.uint8)
    return torch.where(values.signbit() & ~values.isnan(), codes | 8, codes)


def e2m1_values(codes: Tensor) -> Tensor:
    """uint8 codes 0 to 15 -> float32."""
    # Worked out for each code once: the table comes to be on the device, and nothing is copied there.
    table = _values_of(torch.arange(16, dtype=torch.uint8, device=codes.device))
    return table.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)


def _values_of(codes: Tensor) -> Tensor:
    exponent, mantissa = codes >> 1 & 3, codes & 1
    whole = mantissa + 2 * (exponent > 0)
    size = (whole << (exponent.clamp_min(1) - 1)).to(torch.float32) / 2
    return torch.where(codes >= 8, -size, size)


def packed(codes: Tensor) -> Tensor:
    """Codes [..., D] -> bytes [..., D / 2]: an even element lies in the low nibble."""
    pairs = codes.unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4


def unpacked(data: Tensor) -> Tensor:
    """Bytes [..., D / 2] -> codes [..., D]."""
    return torch.stack((data & 15, data >> 4), -1).flatten(-2)


def to_e4m3(values: Tensor) -> Tensor:
    """float64, none below 0 -> e4m3, to nearest even, saturating; NaN stays NaN, without a sign."""
    _, exponent = torch.frexp(values)
    step = power_of_two(exponent.to(torch.int64).clamp(-5, 9) - 4)
    rounded = ((values / step).round() * step).clamp_max(LARGEST_E4M3)
    # Arithmetic on a GPU may give a NaN any sign, and e4m3 would keep it.
    return torch.where(values.isnan(), torch.nan, rounded).to(torch.float32).to(torch.float8_e4m3fn)


def floor_e8m0(values: Tensor) -> Tensor:
    """float64, none below 0 -> the power of two at or below it as e8m0, at least 2**-127; NaN stays NaN."""
    _, exponent = torch.frexp(values)
    exponent = torch.where(values > 0, exponent - 1, LEAST_EXPONENT).clamp(LEAST_EXPONENT, BIAS_E8M0)
    codes = torch.where(values.isnan(), NAN_E8M0, exponent + BIAS_E8M0)
    return codes.to(torch.uint8).view(torch.float8_e8m0fnu)
