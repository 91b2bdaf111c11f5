"""Per-head RMSNorm and partial rotary embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class HeadNorm(nn.Module):
    """RMSNorm over the last dimension, in float32, times ``1 + weight``; one weight [dim] for all heads, 0 at first.

    ``eps`` is added to the mean square; ``device`` and ``dtype`` are the weight's.
    """

    def __init__(
        self, dim: int, eps: float = 1e-6, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """[…, dim] -> […, dim] in x's dtype; float64 stays float64 inside."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * (1 + self.weight)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


def rotate(x: Tensor, positions: Tensor, rotary_dim: int, base: float) -> Tensor:
    """Rotary embedding of the first ``rotary_dim`` dimensions of x [T, H, D] at ``positions`` [T].

    Dimension i < rotary_dim / 2 turns with dimension ``i + rotary_dim / 2`` by ``position * base ** (-2 i /
    rotary_dim)``, in float32 or wider; the rest passes through. The product of two vectors that are rotated so depends
    on the difference of their positions alone.
    """
    if rotary_dim == 0:
        return x
    half = rotary_dim // 2
    wide = torch.promote_types(x.dtype, torch.float32)
    steps = torch.arange(half, device=x.device, dtype=wide)
    angles = positions[:, None, None].to(wide) * base ** (-2.0 * steps / rotary_dim)
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half].to(wide), x[..., half:rotary_dim].to(wide)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
    return torch.cat([turned, x[..., rotary_dim:]], -1)
