"""Quantised queries and keys of the indexer: which scales a call may have, and how kernels take them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from msa_tiles.call import validate
from msa_tiles.quant import FP8, QuantizedTensor


class Indexer(NamedTuple):
    """The indexer's tensors; scales are None but for quantised ones."""

    idx_q: Tensor
    idx_k: Tensor
    q_scale: Tensor | None
    k_scale: Tensor | None


def indexer(idx_q: Any, q_scale: Any, idx_k: Any, k_scale: Any, paged: bool) -> Indexer:
    """Unpack and check queries [T, Hi, Di], keys [Tk, Di] or [pages, page, Di] of the same dtype, and their scales."""
    idx_q, q_scale = _unpacked("idx_q", idx_q, "q_scale", q_scale)
    idx_k, k_scale = _unpacked("idx_k", idx_k, "k_scale", k_scale)
    validate.floating("idx_q", idx_q, "[T, Hi, Di]", further=(FP8,))
    validate.floating("idx_k", idx_k, "[pages, page, Di]" if paged else "[Tk, Di]", idx_q, "idx_q", further=(FP8,))
    if idx_k.shape[-1] != idx_q.shape[2]:
        validate.refuse("idx_k", f"index dim {idx_k.shape[-1]}", f"{idx_q.shape[2]} like idx_q")
    total_q, num_heads = idx_q.shape[:2]
    _check("q_scale", q_scale, idx_q, ([], [num_heads], [total_q, num_heads]), "[], [Hi] or [T, Hi]")
    of_keys = "[] or [pages, page]" if paged else "[] or [Tk]"
    _check("k_scale", k_scale, idx_k, ([], list(idx_k.shape[:-1])), of_keys)
    return Indexer(idx_q, idx_k, q_scale, k_scale)


def _unpacked(name: str, value: Any, scale_name: str, scale: Any) -> tuple[Any, Any]:
    if not isinstance(value, QuantizedTensor):
        return value, scale
    if scale is not None:
        validate.refuse(scale_name, f"a {type(scale).__name__} beside a QuantizedTensor", f"None: {name} has its scale")
    return value.data, value.scale


def _check(name: str, scale: Any, of: Tensor, shapes: tuple[list[Any], ...], dims: str) -> None:
    if of.dtype != FP8:
        validate.scale(name, scale)
        return
    if scale is None:
        return
    if not isinstance(scale, Tensor):
        validate.refuse_type(name, type(scale).__name__, f"a float32 tensor {dims}")
    if scale.dtype != torch.float32:
        validate.refuse_type(name, f"dtype {scale.dtype}", "torch.float32")
    if list(scale.shape) not in shapes:
        known = ", ".join(validate.shape_text(shape) for shape in shapes)
        validate.refuse(name, f"shape {validate.shape_text(scale.shape)}", f"{dims} = one of {known}")
    validate.same_device(name, scale, of, f"idx_{name[0]}")


def has_key_scales(k_scale: Tensor | None) -> bool:
    """Whether every key has a scale of its own. One for all keys ranks no block before another."""
    return k_scale is not None and k_scale.dim() > 0


class KernelScales(NamedTuple):
    """What a kernel gets beside its other tensors and flags; nothing where values are not quantised."""

    tensors: tuple[Tensor, ...]
    flags: tuple[int, ...]


def kernel_scales(call: Indexer, heads_per_group: int, unread: Tensor) -> KernelScales:
    """Scales as the kernels of a selection take them: q_scale [T, Hi], k_scale, and whether q_scale is to be read.

    A positive factor of all scores of a query ranks blocks only among the heads of a group. ``unread``, an int32 tensor
    [n] of the call, stands in for what cannot change a ranking; nothing is allocated.
    """
    if call.idx_q.dtype != FP8:
        return KernelScales((), ())
    unread = unread.view(torch.float32)
    q_scale, k_scale = call.q_scale, call.k_scale
    use_q_scale = heads_per_group > 1 and q_scale is not None and q_scale.dim() > 0
    if q_scale is None or not use_q_scale:
        q_scale = unread[0]
    if k_scale is None or k_scale.dim() == 0:
        k_scale = unread
    return KernelScales((q_scale.expand(call.idx_q.shape[:2]), k_scale), (int(use_q_scale),))


class AppliedScales(NamedTuple):
    """What a kernel that writes scores gets beside queries, beside keys, and as flags; nothing for values without."""

    of_queries: tuple[Tensor, ...]
    of_keys: tuple[Tensor, ...]
    flags: tuple[int, ...]


def applied_scales(call: Indexer, unread: Tensor) -> AppliedScales:
    """Scales as these kernels take them: q_scale [T, Hi] and k_scale, [n] where all keys share one, its first.

    The flags say whether q_scale, and whether the one of all keys, is to be read. ``unread``, an int32 tensor [n] of
    the call, stands in for what is not; nothing is allocated.
    """
    if call.idx_q.dtype != FP8:
        return AppliedScales((), (), ())
    unread = unread.view(torch.float32)
    q_scale, k_scale = call.q_scale, call.k_scale
    flags = (int(q_scale is not None), int(k_scale is not None and not has_key_scales(k_scale)))
    if q_scale is None:
        q_scale = unread[0]
    if k_scale is None:
        k_scale = unread
    elif k_scale.dim() == 0:
        k_scale = k_scale[None]
    return AppliedScales((q_scale.expand(call.idx_q.shape[:2]),), (k_scale,), flags)
