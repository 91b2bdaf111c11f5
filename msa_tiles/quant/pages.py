"""Pages of NVFP4 keys and values as servers lay them out in bytes: views of them, and pools made from 16 bits.

With pages of P tokens, H heads and G = D / 16 groups a page holds
- "vllm": [2 H, P, D / 2 + G] bytes, slot 2 h the keys and slot 2 h + 1 the values of head h. The first P * D / 2 bytes
  of a slot are the elements, token by token, the last P * G the scales: of keys [P, G], of values [P / 4, G, 4].
- "sglang": keys of all heads [H, P, D / 2], their scales [H, P, G], and the same of values, both linear.
Index keys of SGLang have a page [P, D / 2] and its scales [P, G].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from msa_tiles.quant import layouts
from msa_tiles.quant.fp4 import quantize_nvfp4
from msa_tiles.quant.tensor import GROUPS, PACKED, QuantizedTensor, require_tensor, require_unquantised

GROUP = GROUPS["nvfp4"].size
# Values that are converted at a time.
CHUNK = 1 << 24


class Pages(NamedTuple):
    """A ``pool`` of bytes, uint8, and its keys ``k`` and values ``v`` [pages, H, P, D]: views that copy nothing."""

    pool: Tensor
    k: QuantizedTensor
    v: QuantizedTensor


def vllm_pages(pool: Tensor, k_global_scale: Tensor | None = None, v_global_scale: Tensor | None = None) -> Pages:
    """Views of uint8 ``pool`` [pages, 2 H, P, D / 2 + D / 16], whose slots are contiguous.

    Keys and values are [pages, H, P, D / 2], times float32 ``k_global_scale`` and ``v_global_scale`` [], None for 1.
    Raises TypeError or ValueError for another tensor.
    """
    row = GROUP // PACKED + 1  # bytes of a group with its scale
    require_tensor("pool", pool, f"a tensor [pages, 2 H, P, D / 2 + D / {GROUP}]")
    if pool.dtype != torch.uint8:
        raise TypeError(f"pool: got dtype {pool.dtype}; wanted torch.uint8")
    if pool.dim() != 4 or pool.shape[1] % 2 or pool.shape[3] % row or pool.shape[2] % layouts.TOKENS:
        wanted = f"[pages, 2 H, P, D / 2 + D / {GROUP}] with P a multiple of {layouts.TOKENS}"
        raise ValueError(f"pool: got shape {list(pool.shape)}; wanted {wanted}")
    num_pages, slots, page, size = pool.shape
    if pool.stride()[2:] != (size, 1):
        raise ValueError(f"pool: got strides {list(pool.stride())}; wanted slots of contiguous bytes")
    heads, groups = slots // 2, size // row
    outer = (pool.stride(0), 2 * pool.stride(1))
    values_bytes = size - groups

    def plane(slot: int, begin: int, *shape: int) -> Tensor:
        return _plane(pool, slot * pool.stride(1) + begin, outer, (num_pages, heads), shape)

    k, v = (plane(slot, 0, page, values_bytes) for slot in range(2))
    k_scale, v_scale = (
        plane(slot, page * values_bytes, *layouts.shape_in(layout, page, groups)).view(torch.float8_e4m3fn)
        for slot, layout in enumerate(("linear", "interleaved"))
    )
    return Pages(
        pool,
        QuantizedTensor(k, k_scale, "nvfp4", "linear", k_global_scale),
        QuantizedTensor(v, v_scale, "nvfp4", "interleaved", v_global_scale),
    )


def sglang_pages(
    pool: Tensor,
    num_heads: int,
    page_size: int,
    head_dim: int,
    k_global_scale: Tensor | None = None,
    v_global_scale: Tensor | None = None,
) -> Pages:
    """Views of uint8 ``pool`` [pages, bytes of a page], whose rows are contiguous. Otherwise as `vllm_pages`.

    A page has ``page_size`` tokens of ``num_heads`` heads of ``head_dim`` values.
    """
    groups = _groups(head_dim)
    values, scales = page_size * head_dim // PACKED, page_size * groups
    _check_rows(pool, 2 * num_heads * (values + scales))

    def plane(begin: int, size: int, *shape: int) -> Tensor:
        return _plane(pool, begin, (pool.stride(0), size), (pool.shape[0], num_heads), shape)

    half = num_heads * (values + scales)
    k, v = (plane(begin, values, page_size, head_dim // PACKED) for begin in (0, half))
    k_scale, v_scale = (
        plane(begin + num_heads * values, scales, page_size, groups).view(torch.float8_e4m3fn) for begin in (0, half)
    )
    return Pages(
        pool,
        QuantizedTensor(k, k_scale, "nvfp4", "linear", k_global_scale),
        QuantizedTensor(v, v_scale, "nvfp4", "linear", v_global_scale),
    )


def sglang_index_pages(
    pool: Tensor, page_size: int, index_dim: int, global_scale: Tensor | None = None
) -> QuantizedTensor:
    """A view of uint8 ``pool`` [pages, bytes of a page], whose rows are contiguous, as index keys [pages, P, Di / 2].

    P is ``page_size``, Di ``index_dim``; ``global_scale`` float32 [], None for 1. Raises TypeError or ValueError for
    another tensor.
    """
    groups = _groups(index_dim)
    values = page_size * index_dim // PACKED
    _check_rows(pool, values + page_size * groups)
    outer, sizes = (pool.stride(0),), (pool.shape[0],)
    keys = _plane(pool, 0, outer, sizes, (page_size, index_dim // PACKED))
    scale = _plane(pool, values, outer, sizes, (page_size, groups)).view(torch.float8_e4m3fn)
    return QuantizedTensor(keys, scale, "nvfp4", "linear", global_scale)


def quantize_pages(
    k: Tensor,
    v: Tensor,
    order: str,
    *,
    k_global_scale: Tensor | None = None,
    v_global_scale: Tensor | None = None,
    pool: Tensor | None = None,
) -> Pages:
    """``k`` and ``v`` [pages, H, P, D] of 16 or 32 bits -> a pool of NVFP4 bytes in ``order`` "vllm" or "sglang".

    Rounded as in `quantize_nvfp4` under float32 ``k_global_scale`` and ``v_global_scale`` [], None for 1. Whatever lies
    in unused rows is converted, too. ``pool`` is the caller's: uint8 as `vllm_pages` or `sglang_pages` take it; else
    one is made. Raises TypeError or ValueError that names the argument.
    """
    if order not in ("vllm", "sglang"):
        raise ValueError(f"order: got {order!r}; wanted 'vllm' or 'sglang'")
    for name, value in (("k", k), ("v", v)):
        require_tensor(name, value, "a tensor [pages, H, P, D]")
        require_unquantised(name, value)
    if k.dim() != 4 or v.shape != k.shape:
        raise ValueError(f"v: got shape {list(v.shape)} beside k {list(k.shape)}; wanted both [pages, H, P, D]")
    num_pages, heads, page, dim = k.shape
    size = dim // PACKED + _groups(dim)
    shape = (num_pages, 2 * heads, page, size) if order == "vllm" else (num_pages, 2 * heads * page * size)
    if pool is None:
        pool = torch.empty(shape, dtype=torch.uint8, device=k.device)
    require_tensor("pool", pool, f"a tensor {list(shape)}")
    if tuple(pool.shape) != shape:
        raise ValueError(f"pool: got shape {list(pool.shape)}; wanted {list(shape)}")
    if order == "vllm":
        made = vllm_pages(pool, k_global_scale, v_global_scale)
    else:
        made = sglang_pages(pool, heads, page, dim, k_global_scale, v_global_scale)
    for source, target in ((k, made.k), (v, made.v)):
        _fill(source, target)
    return made


def quantize_index_pages(idx_k: Tensor, *, global_scale: Tensor | None = None) -> tuple[Tensor, QuantizedTensor]:
    """``idx_k`` [pages, P, Di] of 16 or 32 bits -> SGLang's pool of bytes, and the keys in it.

    Rounded as in `quantize_nvfp4` under a float32 ``global_scale`` [], None for 1. Raises TypeError or ValueError that
    names the argument.
    """
    require_tensor("idx_k", idx_k, "a tensor [pages, P, Di]")
    require_unquantised("idx_k", idx_k)
    if idx_k.dim() != 3:
        raise ValueError(f"idx_k: got shape {list(idx_k.shape)}; wanted [pages, P, Di]")
    num_pages, page, dim = idx_k.shape
    size = page * (dim // PACKED + _groups(dim))
    pool = torch.empty((num_pages, size), dtype=torch.uint8, device=idx_k.device)
    made = sglang_index_pages(pool, page, dim, global_scale)
    _fill(idx_k, made)
    return pool, made


def _fill(source: Tensor, target: QuantizedTensor) -> None:
    """Some pages at a time, so that what is made on the way stays small beside the pool."""
    step = max(CHUNK // max(source[:1].numel(), 1), 1)
    outer = 1.0 if target.global_scale is None else target.global_scale
    for begin in range(0, source.shape[0], step):
        part = slice(begin, begin + step)
        made = quantize_nvfp4(source[part], outer, layout=target.layout)
        target.data[part].copy_(made.data)
        target.scale[part].view(torch.uint8).copy_(made.scale.view(torch.uint8))


def _groups(dim: int) -> int:
    if dim % GROUP or dim == 0:
        raise ValueError(f"head dim: got {dim}; wanted a multiple of {GROUP}")
    return dim // GROUP


def _check_rows(pool: Tensor, size: int) -> None:
    require_tensor("pool", pool, f"a tensor [pages, {size}]")
    if pool.dtype != torch.uint8:
        raise TypeError(f"pool: got dtype {pool.dtype}; wanted torch.uint8")
    if pool.dim() != 2 or pool.shape[1] != size:
        raise ValueError(f"pool: got shape {list(pool.shape)}; wanted [pages, {size}]")
    if pool.stride(1) != 1:
        raise ValueError(f"pool: got strides {list(pool.stride())}; wanted pages of contiguous bytes")


def _plane(pool: Tensor, begin: int, outer: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """A part [*sizes, *shape] of every page, which begins at a byte of it and is contiguous within one of `sizes`."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return pool.as_strided((*sizes, *shape), (*outer, *reversed(strides)), pool.storage_offset() + begin)
