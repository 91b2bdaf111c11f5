"""FP8: e4m3 (torch.float8_e4m3fn) with float32 scales. e5m2 has two bits of mantissa only and is refused everywhere."""

from __future__ import annotations

import torch
from torch import Tensor

from msa_tiles.quant.tensor import HEADS, PER, QuantizedTensor, require_tensor, require_unquantised

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # e4m3's largest number
LEAST_SCALE = torch.finfo(torch.float32).tiny  # of what a scale is made: a quotient by it is exact to 24 bits


def quantize_fp8(tensor: Tensor, per: str = "tensor") -> QuantizedTensor:
    """Round ``tensor`` to e4m3 (to nearest even): the largest magnitude of a scale's values becomes e4m3's largest.

    Of 16, 32 or 64 bits; scales are float32. ``per`` is "tensor"; "head", for [T, H, D] or [pages, H, page, D]; or
    "token_head", one scale for each row along D: [T, H] of queries [T, H, D], [Tk] of index keys [Tk, D]. Values must
    be finite; NaN stays NaN. Where all are 0, or so small that their scale would be no normal float32 number (below
    2**-117), the scale is 1.
    """
    if per not in PER:
        raise ValueError(f"per: got {per!r}; wanted one of {', '.join(map(repr, PER))}")
    require_tensor("tensor", tensor)
    require_unquantised("tensor", tensor)
    if per == "head" and tensor.dim() < 3:
        raise ValueError(f"tensor: got shape {list(tensor.shape)}; wanted heads, [T, H, D] or [pages, H, page, D]")
    values = tensor.to(torch.float32)
    kept = {"tensor": (), "head": (HEADS,), "token_head": tuple(range(tensor.dim() - 1))}[per]
    reduced = tuple(dim for dim in range(tensor.dim()) if dim not in kept)
    shape = [tensor.shape[dim] for dim in kept]
    if tensor.numel():
        scale = scale_of(values.abs().nan_to_num(nan=0.0).amax(reduced))
    else:
        scale = torch.ones(shape, dtype=torch.float32, device=tensor.device)
    spread = scale.view([size if dim in kept else 1 for dim, size in enumerate(tensor.shape)])
    return QuantizedTensor(round_fp8(values / spread), scale)


def scale_of(largest: Tensor) -> Tensor:
    """The scales, float32 like ``largest``, by which values up to these magnitudes become e4m3; 1 for none."""
    require_tensor("largest", largest)
    # By a tensor on its device: torch multiplies by the inverse of a plain number there, which is a bit off for some.
    scale = largest / largest.new_full((), LARGEST)
    return torch.where(scale >= LEAST_SCALE, scale, 1.0)


def round_fp8(values: Tensor) -> Tensor:
    """float32 values -> e4m3, to nearest even; what is larger becomes the largest number, NaN stays NaN."""
    require_tensor("values", values)
    return values.clamp(-LARGEST, LARGEST).to(FP8)
