"""Keys and values of 4 bits, as kernels take them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from msa_tiles.quant import GROUPS
from msa_tiles.quant.layouts import TOKENS

_GLOBAL = {groups.dtype: groups.has_global for groups in GROUPS.values()}


def of_groups(values: Tensor, scale: Tensor, global_scale: Tensor | None) -> tuple[Tensor, ...]:
    """Bytes, scales of groups, and the global scale where the format has one: float32 [Hkv], 1 for None.

    Scales [.., tokens, G] stay as they are unless ``values`` are pages: those become [.., page / 4, 4, G] whether they
    are linear or interleaved, and only their strides differ. Nothing is copied.
    """
    if scale.dim() > values.dim():
        scale = scale.transpose(-1, -2)
    elif values.dim() == 4:
        scale = scale.unflatten(-2, (-1, TOKENS))
    if not _GLOBAL[scale.dtype]:
        return values, scale
    outer = _one(values) if global_scale is None else global_scale
    return values, scale, outer.expand(values.shape[1])


def _one(like: Tensor) -> Tensor:
    """A 1 that lives as long as the process: a captured call reads it again."""
    if isinstance(like, FakeTensor):
        return like.new_ones((), dtype=torch.float32)
    return _of_device(like.device)


@functools.cache
def _of_device(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.ones((), dtype=torch.float32, device=device)
