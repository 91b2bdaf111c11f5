"""Attention over selected blocks as serving packages call it: packed queries, keys that are flat or in pages of 128."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from msa_tiles import ops
from msa_tiles.compat import kept, positions

BLOCK = 128
FEW_QUERIES = 32  # up to so many for each request the decode operators serve
FP8 = torch.float8_e4m3fn


def places(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    page_table: Tensor | None,
    seqused_k: Tensor | None,
    causal: bool,
    q_offset: int | Tensor | None,
    total_q: int,
) -> dict[str, Any]:
    """The operators' keyword arguments for the places of queries and keys.

    ``q_offset``, an integer or int32 [B], is where a request's first query sits; by default its last one sits on the
    last key. Without ``causal`` every query sees all keys of its request.
    """
    if page_table is None and cu_seqlens_k is None:
        raise ValueError("cu_seqlens_k: got None without page_table; wanted int32 [B + 1], where keys begin")
    lengths = key_lengths(cu_seqlens_k, page_table, seqused_k)
    found: dict[str, Any] = {"cu_seqlens_q": cu_seqlens_q}
    if page_table is None:
        found["cu_seqlens_k"] = cu_seqlens_k
    else:
        found |= {"page_table": page_table, "seqused_k": lengths.contiguous()}
    if not causal:
        found["q_positions"] = positions.last(lengths, cu_seqlens_q, total_q)
    elif q_offset is not None:
        found["q_positions"] = positions.at(q_offset, cu_seqlens_q, total_q)
    return found


def key_lengths(cu_seqlens_k: Tensor | None, page_table: Tensor | None, seqused_k: Tensor | None) -> Tensor:
    """How many keys each request has: int32 [B]."""
    if page_table is not None and seqused_k is not None:
        return seqused_k
    if cu_seqlens_k is None:
        raise ValueError("seqused_k: got None with page_table; wanted int32 [B], the keys of each request")
    return cu_seqlens_k.diff()


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse what no operator here takes, by the caller's names."""
    check_queries(q)
    for name, stored in (("k", k), ("v", v)):
        if stored.dtype == torch.uint8:
            raise NotImplementedError(
                f"{name}: got dtype torch.uint8; wanted bfloat16 or float8_e4m3fn: packed NVFP4 is not served here"
            )


def check_queries(q: Tensor) -> None:
    """Refuse float16, and what is no [T, heads, D]."""
    if q.dim() != 3:
        raise ValueError(f"q: got shape {list(q.shape)}; wanted [T, heads, D]")
    if q.dtype == torch.float16:
        raise TypeError("q: got dtype torch.float16; wanted torch.bfloat16, which all kernels here take")


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    where: dict[str, Any],
    softmax_scale: float | None,
    *,
    few: bool,
    k_scale: float | None = None,
    v_scale: float | None = None,
    block_size: int = BLOCK,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out [T, Hq, D] and lse [T, Hq], with one scale for all keys and one for all values.

    Elements of e4m3 tensors without a scale stand for themselves. Scores of other keys take their scale by way of
    ``softmax_scale``, outputs of other values are multiplied once more.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    scales: dict[str, Any] = {}
    for name, stored, number in (("q_scale", q, None), ("k_scale", k, k_scale), ("v_scale", v, v_scale)):
        if stored.dtype == FP8:
            scales[name] = kept.scalar(1.0 if number is None else float(number), q.device)
    if k.dtype != FP8 and k_scale is not None:
        scale *= float(k_scale)
    call = ops.sparse_decode if few else ops.sparse_attention
    out, lse = call(
        q, k, v, block_indices, block_size=block_size, softmax_scale=scale, return_lse=True, out=out, lse=lse,
        **where, **scales,
    )  # fmt: skip
    if v.dtype != FP8 and v_scale is not None:
        out.mul_(float(v_scale))
    return out, lse
