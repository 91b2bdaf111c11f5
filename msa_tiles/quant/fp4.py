"""NVFP4 and MXFP4: e2m1 in pairs, with a scale for every 16 or 32 values along D."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from msa_tiles.quant import layouts, rounding
from msa_tiles.quant.tensor import GROUPS, PACKED, QuantizedTensor, require_tensor, require_unquantised

# Values that are in work at a time, in float64: near the caches of a CPU, and enough to fill a GPU.
CHUNK = {"cpu": 1 << 18}
OTHER_CHUNK = 1 << 24
_LARGEST = torch.finfo(torch.float32).max
_SMALLEST = torch.finfo(torch.float32).tiny
# Of scales of groups, (float64 largest magnitudes [n]) -> scales as they are stored.
_Scales = Callable[[Tensor], Tensor]


def quantize_nvfp4(
    tensor: Tensor, global_scale: Tensor | float | None = None, *, layout: str = "linear"
) -> QuantizedTensor:
    """``tensor`` [..., T, D], D a multiple of 16 -> e2m1, an e4m3 scale for 16 values, float32 ``global_scale`` [].

    A group's scale is its largest magnitude / 6 / global scale, rounded to e4m3, at most 448; elements are
    value / scale / global scale. Both are rounded once, to nearest even, and saturate: the largest number is
    6 * 448 * global scale, which infinity becomes, too. A group whose scale rounds to 0 is 0. A group that holds NaN is
    NaN: its scale is. Without a ``global_scale`` it is the largest finite magnitude / 2688, and 1 where that is 0.

    ``layout`` of the scales as in `msa_tiles.quant.layouts`. Nothing synchronises; inputs are not changed. Raises
    TypeError or ValueError for tensors that are quantised already, another D, a global scale that is no float32 [].
    """
    values, group = _checked(tensor, "nvfp4"), GROUPS["nvfp4"].size
    if global_scale is None:
        finite = torch.where(values.isfinite(), values, 0).abs()
        largest = finite.amax().double() if values.numel() else values.new_zeros((), dtype=torch.float64)
        # By a tensor on its device: torch multiplies by the inverse of a plain number there.
        most = largest.new_full((), rounding.LARGEST_E2M1 * rounding.LARGEST_E4M3)
        fitting = (largest / most).clamp_min(_SMALLEST)
        made = torch.where(largest > 0, fitting, 1.0).to(torch.float32)
    else:
        made = _global(global_scale, tensor)
    outer = made.double()

    def scales(largest: Tensor) -> Tensor:
        return rounding.to_e4m3(largest / (rounding.LARGEST_E2M1 * outer))

    data, scale = _quantized(values, group, torch.float8_e4m3fn, scales, outer)
    return QuantizedTensor(data, layouts.from_linear(scale, layout), "nvfp4", layout, made)


def quantize_mxfp4(tensor: Tensor, *, layout: str = "linear") -> QuantizedTensor:
    """``tensor`` [..., T, D], D a multiple of 32 -> e2m1 with an e8m0 scale for 32 values.

    As OCP's MX formats say: a group's scale is the power of two at or below its largest magnitude, / 4, at least
    2**-127, so that elements beyond 6 of them saturate. Elements are rounded once, to nearest even. Infinity counts as
    float32's largest number. A group of zeros has the scale 2**-127; one that holds NaN has the scale 0xFF and is NaN.

    ``layout``, errors and promises as in `quantize_nvfp4`.
    """
    values, group = _checked(tensor, "mxfp4"), GROUPS["mxfp4"].size
    data, scale = _quantized(
        values, group, torch.float8_e8m0fnu, lambda largest: rounding.floor_e8m0(largest / 4), None
    )
    return QuantizedTensor(data, layouts.from_linear(scale, layout), "mxfp4", layout)


def _checked(tensor: Tensor, format: str) -> Tensor:
    require_tensor("tensor", tensor, "a tensor [..., T, D]")
    require_unquantised("tensor", tensor)
    group = GROUPS[format].size
    if tensor.dim() < 2 or tensor.shape[-1] % group or tensor.shape[-1] == 0:
        raise ValueError(
            f"tensor: got shape {list(tensor.shape)}; wanted [..., T, D] with D a multiple of {group}, {group} at least"
        )
    return tensor.detach()


def _global(given: Any, tensor: Tensor) -> Tensor:
    if isinstance(given, Tensor):
        if given.dtype != torch.float32 or given.dim():
            came = f"{given.dtype} of shape {list(given.shape)}"
            raise TypeError(f"global_scale: got {came}; wanted a float32 tensor [], or a number")
        if given.device != tensor.device:
            raise ValueError(f"global_scale: got device {given.device}; wanted {tensor.device} like tensor")
        return given
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise TypeError(f"global_scale: got {type(given).__name__}; wanted a float32 tensor [], or a number")
    if not _SMALLEST <= given <= _LARGEST:
        raise ValueError(f"global_scale: got {given}; wanted a number above 0 that float32 holds")
    return torch.full((), float(given), dtype=torch.float32, device=tensor.device)


def _quantized(
    values: Tensor, group: int, dtype: torch.dtype, scales: _Scales, outer: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Bytes [..., D / 2] and linear scales [..., D / group], some rows at a time."""
    *most, dim = values.shape
    rows = values.reshape(-1, dim)
    data = torch.empty((rows.shape[0], dim // PACKED), dtype=torch.uint8, device=values.device)
    stored = torch.empty((rows.shape[0], dim // group), dtype=dtype, device=values.device)
    step = max(CHUNK.get(values.device.type, OTHER_CHUNK) // max(dim, 1), 1)
    for begin in range(0, rows.shape[0] if dim else 0, step):
        part = slice(begin, begin + step)
        exact = rows[part].double().clamp(-_LARGEST, _LARGEST).unflatten(-1, (-1, group))
        scale = scales(exact.abs().amax(-1))
        unit = scale.to(torch.float32).double()
        unit = unit if outer is None else unit * outer
        # Not where the scale is 0 or NaN: whatever the elements were, they are 0 or NaN.
        ratio = torch.where(unit[..., None] > 0, exact / unit[..., None], 0.0)
        data[part] = rounding.packed(rounding.e2m1_codes(ratio).flatten(-2))
        stored[part] = scale
    return data.view(*most, dim // PACKED), stored.view(*most, dim // group)
