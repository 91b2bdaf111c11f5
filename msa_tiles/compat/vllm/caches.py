"""vLLM's caches as our operators take them: views, whatever their strides. Nothing here copies a pool."""

from __future__ import annotations

import torch
from torch import Tensor

from msa_tiles.compat import kept
from msa_tiles.quant import FP8

PAGE = 128
"""Tokens of a page, and of a block of the sparse attention: vLLM has one size for both."""


def index_keys(cache: Tensor) -> Tensor:
    """The index keys [pages, 128, D]; uint8 is e4m3 as vLLM stores it. Raises ValueError for pages of another size."""
    if cache.dim() != 3 or cache.shape[1] != PAGE:
        raise ValueError(f"index_kv_cache: got shape {list(cache.shape)}; wanted [num_blocks, {PAGE}, head_dim]")
    return _elements(cache)


def keys_and_values(cache: Tensor, num_kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """k and v [pages, Hkv, 128, D] of a cache [pages, Hkv, 128, 2 * D]; uint8 is e4m3 as vLLM stores it.

    Raises ValueError for another shape.
    """
    wanted = (num_kv_heads, PAGE, 2 * head_dim)
    if cache.dim() != 4 or cache.shape[1:] != wanted:
        shape = ", ".join(map(str, wanted))
        raise ValueError(f"kv_cache: got shape {list(cache.shape)}; wanted [num_blocks, {shape}]")
    k, v = _elements(cache).split(head_dim, dim=-1)
    return k, v


def scales(
    k: Tensor, v: Tensor, k_scale: Tensor | None, v_scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """k, v and their scales, which vLLM gives as one number, or as [Hkv, tokens of the pool], or leaves out.

    Scales of a cache that is not quantised are not looked at. Without scales an element stands for itself. Raises
    ValueError where one of the two is missing, or for other shapes, or another device.
    """
    if k.dtype.itemsize > 1:
        return k, v, None, None
    if k_scale is None and v_scale is None:
        one = kept.scalar(1.0, k.device)
        return k, v, one, one
    if k_scale is None or v_scale is None:
        missing = "k_scale" if k_scale is None else "v_scale"
        raise ValueError(f"{missing}: got None; wanted a tensor, as the other one is, or None for both")
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale.device != k.device:
            raise ValueError(f"{name}: got device {scale.device}; wanted {k.device} like kv_cache")
    if k_scale.numel() == 1 and v_scale.numel() == 1:
        return k, v, k_scale.view(()), v_scale.view(())
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale.dim() != 2 or scale.shape[0] != k.shape[1] or scale.shape != k_scale.shape:
            wanted = f"one number, or [{k.shape[1]}, tokens] for both k_scale and v_scale"
            raise ValueError(f"{name}: got shape {list(scale.shape)}; wanted {wanted}")
    # A pool may hold more pages than scales were made for, or the other way round: no request has pages beyond.
    pages = min(k.shape[0], k_scale.shape[1] // PAGE)
    of_k, of_v = (scale[:, : pages * PAGE].unflatten(1, (pages, PAGE)).transpose(0, 1) for scale in (k_scale, v_scale))
    return k[:pages], v[:pages], of_k, of_v


def _elements(cache: Tensor) -> Tensor:
    return cache.view(FP8) if cache.dtype == torch.uint8 else cache
