"""Values with their scales: the value that an element stands for is the element times its scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from msa_tiles.quant import layouts, rounding

DTYPES = {"e4m3": torch.float8_e4m3fn, "nvfp4": torch.uint8, "mxfp4": torch.uint8}
PER = ("tensor", "head", "token_head")
HEADS = 1  # the dimension of heads: [T, H, D], or [pages, H, page, D]
PACKED = 2  # elements in a byte of 4-bit formats


class Groups(NamedTuple):
    """The scales of a 4-bit format: one of this dtype for so many values along D; whether there is a global one."""

    dtype: torch.dtype
    size: int
    has_global: bool


GROUPS = {"nvfp4": Groups(torch.float8_e4m3fn, 16, True), "mxfp4": Groups(torch.float8_e8m0fnu, 32, False)}


def require_tensor(name: str, value: object, wanted: str = "a tensor") -> None:
    """Raise TypeError that names an argument which is no tensor, or one that strides do not describe."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}; wanted {wanted}")
    if value.layout != torch.strided:
        raise TypeError(f"{name}: got layout {value.layout}; wanted torch.strided")


def require_unquantised(name: str, value: Tensor) -> None:
    """Raise TypeError that names a tensor whose values nothing can be rounded from."""
    if not value.dtype.is_floating_point or value.dtype.itemsize < 2:
        wanted = "values that are not quantised yet: bfloat16, float16, float32 or float64"
        raise TypeError(f"{name}: got dtype {value.dtype}; wanted {wanted}")


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """Stored elements and their scales; operators take it in place of a tensor.

    ``format`` "e4m3": ``data`` [..., D] float8_e4m3fn and float32 ``scale``, one number [] for the tensor, [H] for the
    heads of [T, H, D] or [pages, H, page, D], or one for each row along D, of the shape of ``data`` without D.

    "nvfp4" and "mxfp4": ``data`` uint8 [..., D / 2], e2m1 pairs with the even element in the low nibble, and ``scale``
    e4m3 [..., D / 16], or e8m0 [..., D / 32], in a ``layout`` of `msa_tiles.quant.layouts` over the dimension before D.
    Values of nvfp4 are times float32 ``global_scale`` [] besides; None stands for 1. A group whose scale is NaN (e8m0:
    0xFF) is NaN.

    Raises TypeError or ValueError that names the part for what does not fit together.
    """

    data: Tensor
    scale: Tensor
    format: str = "e4m3"
    layout: str = "linear"
    global_scale: Tensor | None = None

    def __post_init__(self) -> None:
        if self.format not in DTYPES:
            raise ValueError(f"format: got {self.format!r}; wanted one of {', '.join(map(repr, DTYPES))}")
        require_tensor("data", self.data)
        require_tensor("scale", self.scale)
        if self.data.dtype != DTYPES[self.format]:
            raise TypeError(f"data: got dtype {self.data.dtype}; wanted {DTYPES[self.format]} for {self.format!r}")
        groups = GROUPS.get(self.format)
        dtype = torch.float32 if groups is None else groups.dtype
        if self.scale.dtype != dtype:
            raise TypeError(f"scale: got dtype {self.scale.dtype}; wanted {dtype}")
        if self.scale.device != self.data.device:
            raise ValueError(f"scale: got device {self.scale.device}; wanted {self.data.device} like data")
        self._check_global(groups)
        if groups is not None:
            shape = scale_shape(self.data.shape, groups.size, self.layout)
            if tuple(self.scale.shape) != shape:
                raise ValueError(f"scale: got shape {list(self.scale.shape)}; wanted {list(shape)}, {self.layout}")
        elif self.layout != "linear":
            raise ValueError(f"layout: got {self.layout!r}; wanted 'linear' for {self.format!r}")
        else:
            scale_per(self.scale, self.data.shape)

    def _check_global(self, groups: Groups | None) -> None:
        given = self.global_scale
        if given is None:
            return
        if groups is None or not groups.has_global:
            raise ValueError(f"global_scale: got a {type(given).__name__}; wanted None for {self.format!r}")
        require_tensor("global_scale", given, "a float32 tensor []")
        if given.dtype != torch.float32:
            raise TypeError(f"global_scale: got dtype {given.dtype}; wanted torch.float32")
        if given.dim():
            raise ValueError(f"global_scale: got shape {list(given.shape)}; wanted []")
        if given.device != self.data.device:
            raise ValueError(f"global_scale: got device {given.device}; wanted {self.data.device} like data")

    @property
    def shape(self) -> torch.Size:
        """That of the values."""
        return torch.Size((*self.data.shape[:-1], self.data.shape[-1] * (PACKED if self.format in GROUPS else 1)))

    @property
    def device(self) -> torch.device:
        """That of its parts."""
        return self.data.device

    def to(self, device: str | int | torch.device, non_blocking: bool = False) -> QuantizedTensor:
        """The same tensor on a device; itself where it is there already.

        Raises TypeError for a dtype: its format says how it is stored, and `dequantize` takes one.
        """
        if isinstance(device, torch.dtype) or not isinstance(device, str | int | torch.device):
            came = device if isinstance(device, torch.dtype) else type(device).__name__
            raise TypeError(f"device: got {came}; wanted a device; dequantize() takes a dtype")
        data = self.data.to(device, non_blocking=non_blocking)
        if data is self.data:
            return self
        scale = self.scale.to(device, non_blocking=non_blocking)
        factor = None if self.global_scale is None else self.global_scale.to(device, non_blocking=non_blocking)
        return replace(self, data=data, scale=scale, global_scale=factor)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values, computed in float32."""
        return dequantize(self.data, self.scale, dtype, layout=self.layout, global_scale=self.global_scale)

    def with_layout(self, layout: str) -> QuantizedTensor:
        """The same values with scales in another layout, which are copied unless they are in it."""
        if layout == self.layout:
            return self
        if self.format not in GROUPS:
            raise ValueError(f"layout: got {layout!r}; wanted 'linear' for {self.format!r}")
        rows, groups = self.data.shape[-2], self.shape[-1] // GROUPS[self.format].size
        scale = layouts.from_linear(layouts.to_linear(self.scale, self.layout, rows, groups), layout)
        return QuantizedTensor(self.data, scale, self.format, layout, self.global_scale)


torch.serialization.add_safe_globals([QuantizedTensor])  # torch.load takes it with weights_only=True, too


def scale_shape(data: Sequence[int], group: int, layout: str) -> tuple[int, ...]:
    """The shape of the scales of bytes [..., D / 2] that have one for ``group`` values.

    Raises ValueError where D is no multiple of ``group``, or a layout does not take so many tokens.
    """
    *most, stored = data
    if stored * PACKED % group or (layout != "linear" and not most):
        raise ValueError(f"data: got shape {list(data)}; wanted [..., D / {PACKED}] with D a multiple of {group}")
    if not most:
        return (stored * PACKED // group,)
    return (*most[:-1], *layouts.shape_in(layout, most[-1], stored * PACKED // group))


def scale_per(scale: Tensor, shape: Sequence[int]) -> str:
    """What a scale of e4m3 values of this shape is kept for: "tensor", "head" or "token_head".

    Raises TypeError for no tensor, and ValueError when it fits none of them.
    """
    require_tensor("scale", scale)
    if scale.dim() == 0:
        return "tensor"
    if tuple(scale.shape) == tuple(shape[:-1]):
        return "token_head"
    if len(shape) > 2 and tuple(scale.shape) == (shape[HEADS],):
        return "head"
    fitting = [[], *([[shape[HEADS]]] if len(shape) > 2 else []), list(shape[:-1])]
    raise ValueError(f"scale: got shape {list(scale.shape)}; wanted one of {', '.join(map(str, fitting))}")


def dequantize(
    data: Tensor | QuantizedTensor,
    scale: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    layout: str = "linear",
    global_scale: Tensor | None = None,
) -> Tensor:
    """``data`` times its ``scale`` (1 for None), computed in float32 and returned in ``dtype``, of 16 bits or more.

    Bytes with scales of e4m3 or e8m0 are nvfp4 or mxfp4, with ``layout`` and ``global_scale`` as in a
    `QuantizedTensor`, which may also come as ``data``, with all that it has. Raises TypeError or ValueError for a scale
    that does not fit.
    """
    if isinstance(data, QuantizedTensor):
        if scale is not None or global_scale is not None or layout != "linear":
            raise ValueError("data: got a QuantizedTensor, which has its scales, beside scale, layout or global_scale")
        return data.dequantize(dtype)
    require_tensor("data", data, "a tensor, or a QuantizedTensor")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise TypeError(f"dtype: got {dtype!r}; wanted torch.float32, bfloat16, float16 or float64")
    if scale is not None:
        require_tensor("scale", scale)
    if data.dtype == torch.uint8:
        return _of_groups(data, scale, layout, global_scale).to(dtype)
    values = data.to(torch.float32)
    if scale is None:
        return values.to(dtype)
    per = scale_per(scale, data.shape)
    if per == "head":
        scale = scale.view(-1, *[1] * (data.dim() - HEADS - 1))
    elif per == "token_head":
        scale = scale[..., None]
    return (values * scale).to(dtype)


def _of_groups(data: Tensor, scale: Tensor | None, layout: str, global_scale: Tensor | None) -> Tensor:
    if scale is None or scale.dtype not in {groups.dtype for groups in GROUPS.values()}:
        came = "None" if scale is None else f"dtype {scale.dtype}"
        raise TypeError(f"scale: got {came}; wanted float8_e4m3fn (nvfp4) or float8_e8m0fnu (mxfp4) beside bytes")
    [size] = (groups.size for groups in GROUPS.values() if groups.dtype == scale.dtype)
    count = data.shape[-1] * PACKED // size
    if data.dim() > 1:
        scale = layouts.to_linear(scale, layout, data.shape[-2], count)
    values = rounding.e2m1_values(rounding.unpacked(data)).unflatten(-1, (count, size))
    values = (values * scale.to(torch.float32)[..., None]).flatten(-2)  # exact but for e8m0 beyond float32
    return values if global_scale is None else values * global_scale
