"""Rows written into paged caches, one rounding from the input to what the cache stores, and read out of them."""

from __future__ import annotations

import torch
from torch import Tensor

from msa_tiles.quant import FP8, GROUPS, dequantize, quantize_mxfp4, quantize_nvfp4, round_fp8, scale_of
from msa_tiles.quant.layouts import TOKENS
from msa_tiles.reference.threads import one_thread


@one_thread()
def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """Write k, v [T, H, D] into caches [pages, H, page, D] in place; see `msa_tiles.ops.append_kv`.

    Of e4m3 caches, ``k_scale`` and ``v_scale`` [] or [H] are given, or ``k_scales`` and ``v_scales`` [pages, H, page]
    are written beside the rows. Of 4-bit caches those of groups are written, and the global ones given.
    """
    _append(k, k_cache, slot_mapping, k_scale, k_scales)
    _append(v, v_cache, slot_mapping, v_scale, v_scales)


@one_thread()
def append_index(
    idx_k: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    *,
    scale: Tensor | None = None,
    scales: Tensor | None = None,
) -> None:
    """Write idx_k [T, D] into a cache [pages, page, D] in place; see `msa_tiles.ops.append_index`."""
    _append(idx_k[:, None], cache[:, None], slot_mapping, scale, None if scales is None else scales[:, None])


@one_thread()
def append_rows(
    rows: Tensor, cache: Tensor, slot_mapping: Tensor, scale: Tensor | None = None, scales: Tensor | None = None
) -> None:
    """Write rows [T, H, D] into a cache [pages, H, page, D] at their slots, page * page size + place.

    Rows whose slot is negative or not in the cache are skipped. Into a cache of bytes go two values each, and into
    ``scales`` those of their groups, linear or interleaved; ``scale`` is then the global one.
    """
    _append(rows, cache, slot_mapping, scale, scales)


def _append(rows: Tensor, cache: Tensor, slot_mapping: Tensor, scale: Tensor | None, scales: Tensor | None) -> None:
    num_pages, _, page_size, _ = cache.shape
    kept = (slot_mapping >= 0) & (slot_mapping < num_pages * page_size)
    slots = slot_mapping[kept].long()
    values = rows[kept]
    page, place = slots // max(page_size, 1), slots % max(page_size, 1)
    if cache.dtype == torch.uint8 and scales is not None:
        _append_groups(values, cache, page, place, scale, scales)
        return
    if cache.dtype != FP8:
        cache[page, :, place] = values.to(cache.dtype)
        return
    values = values.float()
    if scales is not None:
        # As `quantize_fp8`: an infinity counts as the largest finite number, NaN not at all.
        own = scale_of(values.abs().nan_to_num(nan=0.0).amax(-1))
        scales[page, :, place] = own
        values = values / own[..., None]
    elif scale is not None:
        values = values / scale.expand(cache.shape[1])[:, None]
    cache.view(torch.uint8)[page, :, place] = round_fp8(values).view(torch.uint8)


def _append_groups(
    values: Tensor, cache: Tensor, page: Tensor, place: Tensor, global_scale: Tensor | None, scales: Tensor
) -> None:
    """Rows [n, H, D] of 4 bits, in the format that the scales are of."""
    if scales.dtype == GROUPS["nvfp4"].dtype:
        made = quantize_nvfp4(values, 1.0 if global_scale is None else global_scale)
    else:
        made = quantize_mxfp4(values)
    cache[page, :, place] = made.data
    stored, groups = scales.view(torch.uint8), made.scale.view(torch.uint8)
    if scales.dim() > cache.dim():
        stored[page, :, place // TOKENS, :, place % TOKENS] = groups
    else:
        stored[page, :, place] = groups


@one_thread()
def dequantize_kv(
    k: Tensor,
    v: Tensor,
    k_out: Tensor,
    v_out: Tensor,
    *,
    page_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_global_scale: Tensor | None = None,
    v_global_scale: Tensor | None = None,
) -> None:
    """Write what quantised keys and values stand for into k_out, v_out [rows, H, D]; see `msa_tiles.ops.dequantize_kv`.

    k, v [Tk, H, D], or [pages, H, page, D] with ``page_table`` [B, W] and ``seqused_k`` [B], rows then B * W * page.
    Scales of groups are interleaved where they have a dimension more than k.
    """
    for values, out, scale, outer in ((k, k_out, k_scale, k_global_scale), (v, v_out, v_scale, v_global_scale)):
        if page_table is None or seqused_k is None:
            out.copy_(_dequantized(values, scale, outer))
        else:
            _gather_pages(values, out, page_table, seqused_k, scale, outer)


def _gather_pages(
    values: Tensor, out: Tensor, table: Tensor, lengths: Tensor, scale: Tensor | None, outer: Tensor | None
) -> None:
    num_pages, heads, page_size, _ = values.shape
    rows = torch.arange(table.shape[1] * page_size, device=table.device)
    if num_pages == 0:
        gathered = out.new_zeros((*table.shape, heads, page_size, out.shape[-1]))
    else:
        pages = table.clamp(0, num_pages - 1).long()
        of_pages = scale is not None and scale.dim() >= values.dim() - 1
        chosen = _taken(scale, pages) if scale is not None and of_pages else scale
        gathered = _dequantized(_taken(values, pages), chosen, outer).view(*table.shape, heads, page_size, -1)
        absent = (table < 0) | (table >= num_pages)
        gathered = gathered.masked_fill(absent[:, :, None, None, None], 0.0)
    found = gathered.transpose(2, 3).reshape(table.shape[0] * len(rows), heads, out.shape[-1])
    used = (rows < lengths[:, None]).flatten()
    out.copy_(torch.where(used[:, None, None], found.to(out.dtype), out))


def _taken(tensor: Tensor, pages: Tensor) -> Tensor:
    """Pages [n, ...] of a tensor; torch indexes no 8-bit floats."""
    plain = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    return plain[pages.flatten()].view(tensor.dtype)


def _dequantized(values: Tensor, scale: Tensor | None, outer: Tensor | None) -> Tensor:
    interleaved = values.dtype == torch.uint8 and scale is not None and scale.dim() > values.dim()
    return dequantize(values, scale, layout="interleaved" if interleaved else "linear", global_scale=outer)
