"""Keys and values of 4 bits, as kernels take them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from msa_tiles.call.workspace import address
from msa_tiles.quant import GROUPS
from msa_tiles.quant.layouts import TOKENS

_GLOBAL = {groups.dtype: groups.has_global for groups in GROUPS.values()}


def of_groups(values: Tensor, scale: Tensor, global_scale: Tensor | None) -> tuple[Tensor, ...]:
    """Bytes, scales of groups, and the global scale where the format has one: float32 [Hkv], 1 for None.

    Scales [.., tokens, G] stay as they are unless ``values`` are pages: those become [.., page / 4, 4, G] whether they
    are linear or interleaved, and only their strides differ. Nothing is copied.
    """
    return values, _by_tokens(values, scale), *_of_heads(values, scale, global_scale)


def to_write(values: Tensor, scale: Tensor, global_scale: Tensor | None) -> tuple[Tensor, ...]:
    """Caches [pages, H, page, D / 2], their scales as bytes [pages, H, page / n, n, G], and global ones like that.

    Pages of any size: n is 4 where that divides a page, and 1 elsewhere.
    """
    if scale.dim() == values.dim():
        spread = scale.unflatten(-2, (-1, 1 if scale.shape[-2] % TOKENS else TOKENS))
    else:
        spread = scale.transpose(-1, -2)
    return values, spread.view(torch.uint8), *_of_heads(values, scale, global_scale)


def _of_heads(values: Tensor, scale: Tensor, global_scale: Tensor | None) -> tuple[Tensor, ...]:
    if not _GLOBAL[scale.dtype]:
        return ()
    outer = _one(values) if global_scale is None else global_scale
    return (outer.expand(values.shape[1]),)


def of_index(keys: Tensor, scale: Tensor, global_scale: Tensor | None) -> tuple[Tensor, ...]:
    """Scales of groups [Tk, G] or [pages, page, G], and the global scale where the format has one: float32 [1]."""
    if not _GLOBAL[scale.dtype]:
        return (scale,)
    outer = _one(keys) if global_scale is None else global_scale
    return scale, outer[None]


def is_odd(values: Tensor, scale: Tensor) -> bool:
    """Whether a token's scales do not lie together, or do not begin at a multiple of as many bytes.

    Of interleaved ones as many bytes are read at once, which belong to several tokens.
    """
    if values.dim() == 4 and values.shape[-2] % TOKENS:
        return True
    scale = _by_tokens(values, scale)
    size, (*outer, last) = scale.shape[-1], scale.stride()
    if scale.dim() > values.dim() and (outer[-1], last) == (1, TOKENS):
        outer.pop()
    elif last != 1:
        return True
    return bool(address(scale) % size) or any(
        step % size for step, count in zip(outer, scale.shape, strict=False) if count > 1
    )


def _by_tokens(values: Tensor, scale: Tensor) -> Tensor:
    if scale.dim() > values.dim():
        return scale.transpose(-1, -2)
    return scale.unflatten(-2, (-1, TOKENS)) if values.dim() == 4 else scale


def _one(like: Tensor) -> Tensor:
    """A 1 that lives as long as the process: a captured call reads it again."""
    if isinstance(like, FakeTensor):
        return like.new_ones((), dtype=torch.float32)
    return _of_device(like.device)


@functools.cache
def _of_device(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.ones((), dtype=torch.float32, device=device)
