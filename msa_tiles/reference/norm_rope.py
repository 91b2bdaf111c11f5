"""Rows that are normed and rotated, and what then becomes of them: queries, or rows of paged caches."""

from __future__ import annotations

import torch
from torch import Tensor

from msa_tiles.quant import FP8, round_fp8
from msa_tiles.reference.caches import append_rows
from msa_tiles.reference.threads import one_thread


@one_thread()
def norm_rope(
    rows: Tensor,
    weight: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Rows [T, H, D] of a ``dtype``: root mean square norm of each, then its first rotary_dim columns rotated.

    ``cos_sin`` [positions, rotary_dim]: cosines of columns i and i + rotary_dim / 2, and behind them their sines. What
    has a position that is none of them is not rotated.
    """
    wide = rows.to(dtype)
    factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = wide * factor * (weight.to(dtype) + weight_offset)
    half = cos_sin.shape[1] // 2
    known = (positions >= 0) & (positions < cos_sin.shape[0])
    found = cos_sin[positions[known].long()].to(dtype)[:, None]
    cosines, sines = found[..., :half], found[..., half:]
    turned = normed[known]
    first, second = turned[..., :half].clone(), turned[..., half : 2 * half].clone()
    turned[..., :half] = first * cosines - second * sines
    turned[..., half : 2 * half] = second * cosines + first * sines
    normed[known] = turned
    return normed


@one_thread()
def norm_rope_append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    q_out: Tensor,
    idx_q: Tensor | None = None,
    idx_k: Tensor | None = None,
    idx_q_weight: Tensor | None = None,
    idx_k_weight: Tensor | None = None,
    idx_out: Tensor | None = None,
    index_cache: Tensor | None = None,
    index_slot_mapping: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    index_cache_scale: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    index_scales: Tensor | None = None,
) -> None:
    """Queries to q_out and idx_out, which may be q and idx_q, keys and values to their slots, in place.

    See `msa_tiles.ops.norm_rope_append`; scales as in `append_kv` and `append_index`. Without ``idx_q`` nothing of an
    index is looked at.
    """

    def turned(rows: Tensor, weight: Tensor) -> Tensor:
        return norm_rope(rows, weight, cos_sin, positions, eps=eps, weight_offset=weight_offset)

    append_rows(turned(k, k_weight), k_cache, slot_mapping, k_scale, k_scales)
    append_rows(v, v_cache, slot_mapping, v_scale, v_scales)
    q_out.copy_(turned(q, q_weight))
    if idx_q is None or idx_k is None or idx_q_weight is None or idx_k_weight is None:
        return
    if idx_out is not None:
        queries = turned(idx_q, idx_q_weight)
        idx_out.copy_(round_fp8(queries) if idx_out.dtype == FP8 else queries)
    if index_cache is not None:
        slots = slot_mapping if index_slot_mapping is None else index_slot_mapping
        keys, scales = turned(idx_k[:, None], idx_k_weight), None if index_scales is None else index_scales[:, None]
        append_rows(keys, index_cache[:, None], slots, index_cache_scale, scales)
