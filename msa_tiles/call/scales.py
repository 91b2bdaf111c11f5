"""Quantised tensors and their scales: taken apart, and checked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from msa_tiles.call import formats, validate
from msa_tiles.quant import QuantizedTensor, dequantize


def unpacked(name: str, value: Any, scale: Any, scale_name: str) -> tuple[Any, Any]:
    """The elements and the scale of queries, which may be a `QuantizedTensor` or a tensor beside its scale."""
    data, scale, _ = unpacked_keys(name, value, scale, scale_name)
    if formats.is_packed(data):
        validate.refuse_type(
            name, f"format {value.format!r}", "values without scales, or 'e4m3': only keys have 4 bits"
        )
    return data, scale


def unpacked_keys(name: str, value: Any, scale: Any, scale_name: str) -> tuple[Any, Any, Any]:
    """The elements, the scale and the global scale of keys or values. Bytes come in a `QuantizedTensor` alone."""
    if not isinstance(value, QuantizedTensor):
        refuse_bytes(name, value)
        return value, scale, None
    if scale is not None:
        came = f"a {type(scale).__name__} beside a QuantizedTensor"
        validate.refuse(scale_name, came, f"None: {name} has its scale")
    if value.layout == "swizzled":
        wanted = "'linear' or 'interleaved', which QuantizedTensor.with_layout makes of them"
        validate.refuse(name, "scales in the layout 'swizzled'", wanted)
    return value.data, value.scale, value.global_scale


def refuse_bytes(name: str, value: Any) -> None:
    """Refuse a tensor of bytes by itself."""
    if formats.is_packed(value):
        validate.refuse_type(name, f"dtype {value.dtype}", "bytes in a QuantizedTensor, which says what they hold")


def check_scale(
    name: str, scale: Any, of: Tensor, of_name: str, shapes: dict[str, tuple[int, ...]], *, required: bool
) -> None:
    """Check the float32 scale of a tensor: of one of these shapes, which are named by their dims; any strides.

    A tensor that is not quantised has no scale. Where None would change the answer, a scale is ``required``.
    """
    if not formats.is_quantised(of):
        validate.scale(name, scale)
        return
    if formats.is_packed(of):
        return  # made with its scales
    *most, last = shapes
    dims = f"{', '.join(most)} or {last}"
    if scale is None:
        if required:
            validate.refuse(name, "None", f"float32 {dims}: {of_name} is {of.dtype}")
        return
    if not isinstance(scale, Tensor):
        validate.refuse_type(name, type(scale).__name__, f"a float32 tensor {dims}")
    validate.strided(name, scale)
    if scale.dtype != torch.float32:
        validate.refuse_type(name, f"dtype {scale.dtype}", "torch.float32")
    if tuple(scale.shape) not in shapes.values():
        known = ", ".join(validate.shape_text(shape) for shape in shapes.values())
        validate.refuse(name, f"shape {validate.shape_text(scale.shape)}", f"{dims} = one of {known}")
    validate.same_device(name, scale, of, of_name)


def of_queries(name: str, scale: Any, queries: Tensor, of_name: str, heads: str, *, required: bool = False) -> None:
    """Check the scale of queries [T, heads, D]."""
    total_q, num_heads = queries.shape[:2]
    shapes: dict[str, tuple[int, ...]] = {"[]": (), f"[{heads}]": (num_heads,), f"[T, {heads}]": (total_q, num_heads)}
    check_scale(name, scale, queries, of_name, shapes, required=required)


def of_index_keys(name: str, scale: Any, keys: Tensor, of_name: str, paged: bool) -> None:
    """Check the scale of index keys [Tk, Di] or [pages, page, Di]; None stands for 1."""
    _check_layout(name, scale, keys, paged)
    shapes: dict[str, tuple[int, ...]] = {"[]": (), "[pages, page]" if paged else "[Tk]": tuple(keys.shape[:-1])}
    check_scale(name, scale, keys, of_name, shapes, required=False)


def of_keys(name: str, scale: Any, keys: Tensor, of_name: str, paged: bool) -> None:
    """Check the scale of keys or values [Tk, Hkv, D] or [pages, Hkv, page, D]."""
    _check_layout(name, scale, keys, paged)
    rows = "[pages, Hkv, page]" if paged else "[Tk, Hkv]"
    shapes: dict[str, tuple[int, ...]] = {"[]": (), "[Hkv]": (keys.shape[1],), rows: tuple(keys.shape[:-1])}
    check_scale(name, scale, keys, of_name, shapes, required=True)


def _check_layout(name: str, scale: Any, keys: Tensor, paged: bool) -> None:
    """Scales of four tokens beside each other are those of pages, which have tokens before D."""
    if formats.is_packed(keys) and scale.dim() > keys.dim() and not paged:
        validate.refuse(name, "the layout 'interleaved' for flat keys", "'linear', or pages")


def per_token(scale: Tensor | None, keys: Tensor) -> bool:
    """Whether every row of keys has a scale of its own, and one only."""
    return scale is not None and scale.dim() == keys.dim() - 1


def of_values(values: Tensor, scale: Tensor | None, global_scale: Tensor | None) -> Tensor:
    """What keys or values of a checked call stand for, in float32."""
    interleaved = formats.is_packed(values) and scale is not None and scale.dim() > values.dim()
    layout = "interleaved" if interleaved else "linear"
    return dequantize(values, scale, layout=layout, global_scale=global_scale)
