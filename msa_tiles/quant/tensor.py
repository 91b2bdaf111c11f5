"""Values with their scales: the value that an element stands for is the element times its scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = {"e4m3": torch.float8_e4m3fn}
PER = ("tensor", "head", "token_head")
HEADS = 1  # the dimension of heads: [T, H, D], or [pages, H, page, D]


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """``data`` [..., D] of the format's dtype, and float32 ``scale``; operators take it in place of a tensor.

    The scale is one number [] for the tensor, [H] for the heads of [T, H, D] or [pages, H, page, D], or one for each
    row along D, of the shape of ``data`` without D.
    """

    data: Tensor
    scale: Tensor
    format: str = "e4m3"

    def __post_init__(self) -> None:
        if self.format not in DTYPES:
            raise ValueError(f"format: got {self.format!r}; wanted one of {', '.join(map(repr, DTYPES))}")
        if self.data.dtype != DTYPES[self.format]:
            raise TypeError(f"data: got dtype {self.data.dtype}; wanted {DTYPES[self.format]} for {self.format!r}")
        if self.scale.dtype != torch.float32:
            raise TypeError(f"scale: got dtype {self.scale.dtype}; wanted torch.float32")
        if self.scale.device != self.data.device:
            raise ValueError(f"scale: got device {self.scale.device}; wanted {self.data.device} like data")
        scale_per(self.scale, self.data.shape)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values, computed in float32."""
        return dequantize(self.data, self.scale, dtype)


def scale_per(scale: Tensor, shape: Sequence[int]) -> str:
    """What a scale of values of this shape is kept for: "tensor", "head" or "token_head".

    Raises ValueError when it fits none of them.
    """
    if scale.dim() == 0:
        return "tensor"
    if tuple(scale.shape) == tuple(shape[:-1]):
        return "token_head"
    if len(shape) > 2 and tuple(scale.shape) == (shape[HEADS],):
        return "head"
    fitting = [[], *([[shape[HEADS]]] if len(shape) > 2 else []), list(shape[:-1])]
    raise ValueError(f"scale: got shape {list(scale.shape)}; wanted one of {', '.join(map(str, fitting))}")


def dequantize(data: Tensor, scale: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """``data`` times its scale (1 for None), computed in float32 and returned in ``dtype``."""
    values = data.to(torch.float32)
    if scale is None:
        return values.to(dtype)
    per = scale_per(scale, data.shape)
    if per == "head":
        scale = scale.view(-1, *[1] * (data.dim() - HEADS - 1))
    elif per == "token_head":
        scale = scale[..., None]
    return (values * scale).to(dtype)
