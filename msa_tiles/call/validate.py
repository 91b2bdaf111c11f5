"""Checks of one argument each. Every error names the argument, what came and what is wanted."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float32, torch.float64)
LAYOUTS = ("head_major", "token_major")
LARGEST_BLOCK = 1 << 16  # tokens; a block is laid out whole somewhere
LARGEST_TOPK = 1 << 16  # blocks, each of which has room in the result; kernels take at most 64
LARGEST_COUNT = (1 << 31) - 1  # of tokens, blocks or heads: kernels count in int32
LARGEST_MEMORY = (1 << 63) - 1  # bytes; torch counts in int64
# Kernels take a row's maximum before they scale, so a scale is above 0; and they divide an LSE by it in float32.
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-64, 2.0**64


def refuse(name: str, came: str, wanted: str) -> NoReturn:
    """A value that an argument cannot have."""
    raise ValueError(f"{name}: got {came}; wanted {wanted}")


def refuse_type(name: str, came: str, wanted: str) -> NoReturn:
    """A type or dtype that an argument cannot have."""
    raise TypeError(f"{name}: got {came}; wanted {wanted}")


def shape_text(shape: Sequence[Any]) -> str:
    return f"[{', '.join(str(size) for size in shape)}]"


def tensor(name: str, value: Any, dims: str) -> Tensor:
    """A tensor with as many dimensions as ``dims``, which is a text such as "[T, Hq, D]"."""
    if not isinstance(value, Tensor):
        refuse_type(name, type(value).__name__, f"a tensor {dims}")
    if value.dim() != dims.count(",") + 1:
        refuse(name, f"shape {shape_text(value.shape)}", f"{dims.count(',') + 1} dimensions {dims}")
    return strided(name, value)


def strided(name: str, value: Tensor) -> Tensor:
    if value.layout != torch.strided:
        refuse_type(name, f"layout {value.layout}", "torch.strided")
    return value


def shaped(name: str, value: Any, shape: Sequence[Any], dims: str) -> Tensor:
    """A tensor of this shape (None: any size), which ``dims`` describes."""
    tensor(name, value, dims)
    _sizes(name, value, shape, dims)
    return value


def _sizes(name: str, value: Tensor, shape: Sequence[Any], dims: str) -> None:
    if any(wanted is not None and size != wanted for size, wanted in zip(value.shape, shape, strict=True)):
        known = [
            label if size is None else size for size, label in zip(shape, dims.strip("[]").split(", "), strict=True)
        ]
        refuse(name, f"shape {shape_text(value.shape)}", f"{dims} = {shape_text(known)}")


def floating(
    name: str,
    value: Any,
    dims: str,
    like: Tensor | None = None,
    like_name: str = "",
    further: tuple[torch.dtype, ...] = (),
) -> Tensor:
    """A float tensor with a unit last stride; on the device and of the dtype of ``like`` where that is given.

    ``further`` dtypes are those of quantised tensors, where the operator takes them.
    """
    tensor(name, value, dims)
    if like is not None and value.dtype != like.dtype:
        refuse_type(name, f"dtype {value.dtype}", f"{like.dtype} like {like_name}")
    if value.dtype not in FLOATS + further:
        *most, last = map(str, FLOATS + further)
        refuse_type(name, f"dtype {value.dtype}", f"{', '.join(most)} or {last}")
    if like is not None:
        same_device(name, value, like, like_name)
    unit_last_stride(name, value, "stride 1 (.contiguous() makes one)")
    return value


def keys_dims(name: str, value: Any, flat: str, pages: str, paged: bool) -> str:
    """How keys lie, flat or in pages. Refuses those that lie the other way, which ``page_table`` decides."""
    dims, other = (pages, flat) if paged else (flat, pages)
    if isinstance(value, Tensor) and value.dim() == other.count(",") + 1:
        hint = "flat keys come without page_table" if paged else "keys in pages come with page_table"
        wanted = f"{dims.count(',') + 1} dimensions {dims}; {hint}"
        refuse(name, f"shape {shape_text(value.shape)}", wanted)
    return dims


def int32(name: str, value: Any, shape: Sequence[Any], dims: str, like: Tensor, like_name: str) -> Tensor:
    """An int32 tensor of this shape (None: any size) on the device of ``like``."""
    tensor(name, value, dims)
    if value.dtype != torch.int32:
        refuse_type(name, f"dtype {value.dtype}", "torch.int32")
    _sizes(name, value, shape, dims)
    same_device(name, value, like, like_name)
    return value


def float32(name: str, value: Any, shape: Sequence[Any], dims: str, like: Tensor, like_name: str) -> Tensor:
    """A float32 tensor of this shape on the device of ``like``."""
    tensor(name, value, dims)
    if value.dtype != torch.float32:
        refuse_type(name, f"dtype {value.dtype}", "torch.float32")
    _sizes(name, value, shape, dims)
    same_device(name, value, like, like_name)
    return value


def same_device(name: str, value: Tensor, like: Tensor, like_name: str) -> None:
    if value.device != like.device:
        refuse(name, f"device {value.device}", f"{like.device} like {like_name}")


def unit_last_stride(name: str, value: Tensor, wanted: str = "stride 1") -> None:
    # Strides of what holds nothing are whatever its maker wrote: NumPy writes zeros.
    if value.shape[-1] > 1 and value.stride(-1) != 1 and value.numel():
        refuse(name, f"stride {value.stride(-1)} on the last dimension", wanted)


def dense(name: str, value: Tensor) -> None:
    """A small index array that kernels read through a bare pointer."""
    if not value.is_contiguous():
        refuse(name, f"strides {shape_text(value.stride())}", "a contiguous tensor")


def plain(value: Any) -> Any:
    """An integer of NumPy, or of another kind that is one, as Python's; anything else as it came."""
    if value is None or isinstance(value, (int, float, str, torch.SymInt, Tensor)) or not hasattr(value, "__index__"):
        return value
    with contextlib.suppress(TypeError):  # NumPy's True
        return operator.index(value)
    return value


def integer(name: str, value: Any, least: int, most: int = LARGEST_COUNT) -> None:
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        refuse_type(name, type(value).__name__, f"an integer of at least {least}")
    if value < least:
        refuse(name, str(value), f"at least {least}")
    if value > most:
        refuse(name, str(value), f"at most {most}")


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        refuse_type(name, type(value).__name__, "True or False")
    return value


def one_of(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        refuse(name, repr(value), f"one of {', '.join(repr(choice) for choice in choices)}")


def scale(name: str, value: Any) -> None:
    """A tensor that is not quantised has no scale; one that came anyway must not be dropped."""
    if value is not None:
        refuse(name, f"a {type(value).__name__}", "None: bfloat16, float32 and float64 tensors have no scale")


def softmax_scale(value: Any, head_dim: int, name: str = "softmax_scale") -> float:
    """The scale as a number, ``D ** -0.5`` by default. One of 0 or below, NaN and infinity are refused."""
    if value is None:
        return head_dim**-0.5
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        refuse_type(name, type(value).__name__, "a number or None")
    if not SMALLEST_SCALE <= value <= LARGEST_SCALE:
        refuse(name, str(value), "a number above 0, from 2**-64 to 2**64")
    return float(value)


def destination(
    name: str, value: Any, shape: Sequence[Any], dims: str, dtype: torch.dtype, like: Tensor, like_name: str
) -> Tensor:
    """A caller's buffer: exactly this shape (None: any size), unit last stride, no element twice."""
    tensor(name, value, dims)
    if value.dtype != dtype:
        refuse_type(name, f"dtype {value.dtype}", str(dtype))
    _sizes(name, value, shape, dims)
    same_device(name, value, like, like_name)
    unit_last_stride(name, value)
    return written(name, value)


def written(name: str, value: Tensor) -> Tensor:
    """A tensor that a call writes into: past autograd, and no element twice."""
    if value.requires_grad and torch.is_grad_enabled():
        refuse(name, "a tensor that requires grad", "a buffer: results are written into it, past autograd")
    if not _holds_once(value):
        refuse(name, f"strides {shape_text(value.stride())}", "a buffer that holds every element once")
    return value


def _holds_once(value: Tensor) -> bool:
    """Whether every stride passes over what the smaller ones reach, as in any view of a dense tensor."""
    dims = [(size, stride) for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1]
    for index, (_, stride) in enumerate(dims):
        others = dims[:index] + dims[index + 1 :]
        if stride <= sum((size - 1) * smaller for size, smaller in others if smaller <= stride):
            return False
    return True


def scratch(name: str, value: Any, like: Tensor, like_name: str) -> Tensor:
    """A uint8 tensor that a call may overwrite."""
    tensor(name, value, "[bytes]")
    if value.dtype != torch.uint8:
        refuse_type(name, f"dtype {value.dtype}", "torch.uint8")
    same_device(name, value, like, like_name)
    dense(name, value)
    return value
