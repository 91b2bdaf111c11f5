"""How the tensors of a call are stored."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from msa_tiles.call.validate import FLOATS
from msa_tiles.quant import FP8, GROUPS, PACKED

BYTES = torch.uint8  # of keys and values of 4 bits, whose scales say in which format
_CALLED = [str(dtype).removeprefix("torch.") for dtype in (*FLOATS, FP8)]
CALLED = f"{', '.join(_CALLED)}, and uint8 of {' and '.join(GROUPS)}"  # what calls pass
_FORMATS = {groups.dtype: name for name, groups in GROUPS.items()}


def is_quantised(tensor: Tensor) -> bool:
    """Whether its elements stand for values only together with a scale."""
    return tensor.dtype in (FP8, BYTES)


def is_packed(tensor: Any) -> bool:
    """Whether several elements share a byte, as in 4-bit formats. False for what is no tensor."""
    return isinstance(tensor, Tensor) and tensor.dtype == BYTES


def width(tensor: Tensor) -> int:
    """Elements of a row along D."""
    return tensor.shape[-1] * (PACKED if is_packed(tensor) else 1)


def stored(tensor: Tensor, scale: Tensor | None) -> str:
    """How a tensor is stored: the format's name for 4 bits, else the dtype's."""
    if is_packed(tensor) and scale is not None and scale.dtype in _FORMATS:
        return _FORMATS[scale.dtype]
    return str(tensor.dtype).removeprefix("torch.")


def told_by_calls(format: str, storage: str) -> bool:
    """Whether calls pass tensors of a format of this name and storage."""
    return format in GROUPS or storage in _CALLED


def output_dtype(query: Tensor) -> torch.dtype:
    """The dtype of attention's output: the query's, bfloat16 for quantised ones."""
    return torch.bfloat16 if is_quantised(query) else query.dtype
