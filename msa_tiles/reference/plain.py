"""The operators written down as directly as possible: whole matrices, whole masks, one request at a time.

The same arguments and results as the blockwise functions beside it. Memory grows with T * Tk: for small shapes, and for
reading what the others compute.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from msa_tiles.quant import dequantize
from msa_tiles.reference.attention import combine
from msa_tiles.reference.batch import Batch, Request, accumulator, flat_or_paged, key_rows, read_batch, score_width

__all__ = [
    "build_schedule",
    "combine",
    "index_kl",
    "index_score",
    "select_blocks",
    "sparse_attention",
    "sparse_attention_backward",
    "topk_select",
]


def index_score(
    idx_q: Tensor,
    idx_k: Tensor,
    *,
    block_size: int = 128,
    causal: bool = True,
    num_blocks: int | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    **where: Any,
) -> Tensor:
    """See `reference.index_score`."""
    page_table = where.get("page_table")
    batch = read_batch(idx_q.shape[0], idx_q.device, **flat_or_paged(idx_k, page_table), **where)
    if num_blocks is None:
        num_blocks = score_width(idx_k, block_size, page_table, where.get("max_seqlen_k"), where.get("k_offset"))
    # Whole, where the blockwise functions go piece by piece; keys that nobody uses may hold anything.
    idx_q = idx_q if q_scale is None else dequantize(idx_q, q_scale)
    idx_k = idx_k if k_scale is None else dequantize(idx_k, k_scale)
    dtype = accumulator(idx_q.dtype)
    shape = (idx_q.shape[1], idx_q.shape[0], num_blocks)
    score = torch.full(shape, -torch.inf, dtype=torch.float32, device=idx_q.device)
    for request in batch.requests:
        rows = slice(request.query_begin, request.query_end)
        keys, present = key_rows(idx_k, request, 0, request.num_keys, page_table)
        products = torch.einsum("thd,jd->htj", idx_q[rows].to(dtype), keys.to(dtype))
        positions = torch.arange(request.key_offset, request.key_end, device=idx_q.device)
        hidden = products.isnan()
        if causal:
            hidden = hidden | (positions > batch.limit[rows, None])
        if present is not None:
            hidden = hidden | ~present
        products = products.masked_fill(hidden, -torch.inf).to(torch.float32)
        for block in range(num_blocks):
            inside = torch.div(positions, block_size, rounding_mode="floor") == block
            if inside.any():
                score[:, rows, block] = products[:, :, inside].amax(-1)
    return score


def topk_select(
    score: Tensor,
    topk: int,
    *,
    num_kv_heads: int | None = None,
    num_valid_blocks: int | Tensor | None = None,
    block_size: int = 128,
    init_blocks: int = 0,
    local_blocks: int = 1,
    order: str = "ascending",
    layout: str = "head_major",
    **where: Any,
) -> Tensor:
    """See `reference.topk_select`."""
    if layout == "token_major":
        score = score.transpose(0, 1)
    num_heads, total_q, width = score.shape
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    batch = read_batch(total_q, score.device, **where)
    valid = batch.num_valid_blocks(block_size).tolist()
    if isinstance(num_valid_blocks, Tensor):
        valid = num_valid_blocks.tolist()
    elif num_valid_blocks is not None:
        valid = [num_valid_blocks] * total_q
    request = batch.request.tolist()
    per_group = num_heads // num_kv_heads
    ids = torch.full((num_kv_heads, total_q, topk), -1, dtype=torch.int32, device=score.device)
    rows = score.tolist()
    for head in range(num_kv_heads):
        group = rows[head * per_group : (head + 1) * per_group]
        for token in range(total_q):
            end = min(max(valid[token], 0), width) if request[token] >= 0 else 0
            best = [_best([scores[token][block] for scores in group]) for block in range(end)]
            chosen = _choose(best, topk, init_blocks, local_blocks, order)
            ids[head, token, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32, device=ids.device)
    return ids


def _best(scores: list[float]) -> float:
    """The largest of a block's scores, NaN only if all are."""
    numbers = [score for score in scores if not math.isnan(score)]
    return max(numbers) if numbers else math.nan


def _choose(scores: list[float], topk: int, init_blocks: int, local_blocks: int, order: str) -> list[int]:
    """The chosen ids of one row, in their order."""
    num_blocks = len(scores)
    init = list(range(min(init_blocks, num_blocks)))
    local = [block for block in range(max(num_blocks - local_blocks, 0), num_blocks) if block not in init]
    ranked = [block for block in range(num_blocks) if block not in init and block not in local]
    # NaN goes behind every number; it must not take part in a comparison of scores.
    ranked.sort(key=lambda block: (1, 0.0, block) if math.isnan(scores[block]) else (0, -scores[block], block))
    chosen = (init + local + ranked)[:topk]
    if order == "ascending":
        return sorted(chosen)
    if order == "local_last":
        return [block for block in chosen if block not in local] + [block for block in chosen if block in local]
    return chosen


def select_blocks(
    idx_q: Tensor,
    idx_k: Tensor,
    topk: int,
    *,
    num_kv_heads: int | None = None,
    block_size: int = 128,
    init_blocks: int = 0,
    local_blocks: int = 1,
    order: str = "ascending",
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    **where: Any,
) -> Tensor:
    """See `reference.select_blocks`."""
    page_table = where.get("page_table")
    batch = read_batch(idx_q.shape[0], idx_q.device, **flat_or_paged(idx_k, page_table), **where)
    return topk_select(
        index_score(idx_q, idx_k, block_size=block_size, q_scale=q_scale, k_scale=k_scale, **where),
        topk,
        num_kv_heads=num_kv_heads,
        num_valid_blocks=batch.num_valid_blocks(block_size),
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        order=order,
        cu_seqlens_q=where.get("cu_seqlens_q"),
    )


def build_schedule(
    block_indices: Tensor, *, block_size: int = 128, **where: Any
) -> list[dict[tuple[int, int], list[int]]]:
    """Per KV head: (request, block) -> the edges query * k + slot that read it, queries ascending."""
    num_kv_heads, total_q, topk = block_indices.shape
    batch = read_batch(total_q, block_indices.device, **where)
    request, limit, ids = batch.request.tolist(), batch.limit.tolist(), block_indices.tolist()
    readers: list[dict[tuple[int, int], list[int]]] = [{} for _ in range(num_kv_heads)]
    for head in range(num_kv_heads):
        for token in range(total_q):
            for slot, block in enumerate(ids[head][token]):
                if request[token] >= 0 and 0 <= block * block_size <= limit[token]:
                    readers[head].setdefault((request[token], block), []).append(token * topk + slot)
    return [dict(sorted(head.items())) for head in readers]


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    *,
    block_size: int = 128,
    softmax_scale: float | None = None,
    **where: Any,
) -> tuple[Tensor, Tensor]:
    """See `reference.sparse_attention`. Differentiable in q, k and v; hidden values must be finite."""
    page_table = where.get("page_table")
    batch = read_batch(q.shape[0], q.device, **flat_or_paged(k, page_table), **where)
    dtype = accumulator(q.dtype)
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    group = q.shape[1] // block_indices.shape[0]
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    for request in batch.requests:
        rows = slice(request.query_begin, request.query_end)
        keys, present = key_rows(k, request, 0, request.num_keys, page_table)
        values, _ = key_rows(v, request, 0, request.num_keys, page_table)
        chosen = _chosen(batch, request, block_indices, block_size)
        if present is not None:
            chosen = chosen & present
        chosen = chosen.repeat_interleave(group, 0)
        keys, values = keys.to(dtype).repeat_interleave(group, 1), values.to(dtype).repeat_interleave(group, 1)
        scores = torch.einsum("thd,jhd->htj", q[rows].to(dtype), keys) * scale
        scores = scores.masked_fill(~chosen, -torch.inf)
        total = scores.logsumexp(-1)
        weights = torch.exp(scores - torch.where(total == -torch.inf, 0.0, total)[..., None])
        out[rows] = torch.einsum("htj,jhd->thd", weights, values).to(q.dtype)
        lse[rows] = total.T.to(torch.float32)
    return out, lse


def _chosen(batch: Batch, request: Request, block_indices: Tensor, block_size: int) -> Tensor:
    """Which keys of a request its queries select and see: bool [Hkv, n, keys]."""
    rows = slice(request.query_begin, request.query_end)
    positions = torch.arange(request.key_offset, request.key_end, device=block_indices.device)
    blocks = torch.div(positions, block_size, rounding_mode="floor")
    return (block_indices[:, rows, :, None] == blocks).any(2) & (positions <= batch.limit[rows, None])


def sparse_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    block_indices: Tensor,
    *,
    dlse: Tensor | None = None,
    block_size: int = 128,
    softmax_scale: float | None = None,
    **where: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.sparse_attention_backward`."""
    batch = read_batch(q.shape[0], q.device, total_k=k.shape[0], **where)
    dtype = accumulator(q.dtype)
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    group = q.shape[1] // k.shape[1]
    dq, dk, dv = (torch.zeros(part.shape, dtype=dtype, device=q.device) for part in (q, k, v))
    for request in batch.requests:
        rows = slice(request.query_begin, request.query_end)
        flat = slice(request.key_row, request.key_row + request.num_keys)
        keys, values = (part[flat].to(dtype).repeat_interleave(group, 1) for part in (k, v))
        chosen = _chosen(batch, request, block_indices, block_size).repeat_interleave(group, 0)
        empty = ~chosen.any(-1).T[..., None]
        queries, gradient = q[rows].to(dtype), dout[rows].to(dtype).masked_fill(empty, 0.0)
        weights = torch.exp(torch.einsum("thd,jhd->htj", queries, keys) * scale - lse[rows].T[..., None].to(dtype))
        weights = weights.masked_fill(~chosen, 0.0)
        delta = (out[rows].to(dtype) * gradient).sum(-1)
        if dlse is not None:
            delta = delta - dlse[rows].to(dtype).masked_fill(empty[..., 0], 0.0)
        dscores = weights * (torch.einsum("thd,jhd->htj", gradient, values) - delta.T[..., None]) * scale
        dq[rows] = torch.einsum("htj,jhd->thd", dscores, keys)
        dk[flat] = torch.einsum("htj,thd->jhd", dscores, queries).unflatten(1, (-1, group)).sum(2)
        dv[flat] = torch.einsum("htj,thd->jhd", weights, gradient).unflatten(1, (-1, group)).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def index_kl(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    idx_q: Tensor,
    idx_k: Tensor,
    block_indices: Tensor | None,
    *,
    block_size: int = 128,
    softmax_scale: float | None = None,
    index_scale: float | None = None,
    token_weights: Tensor | None = None,
    **where: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.index_kl`."""
    batch = read_batch(q.shape[0], q.device, total_k=k.shape[0], **where)
    dtype = accumulator(q.dtype)
    total_q, num_heads, index_dim = idx_q.shape
    group = q.shape[1] // num_heads
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    index_scale = index_dim**-0.5 if index_scale is None else index_scale
    weights = torch.ones(total_q, dtype=dtype, device=q.device) if token_weights is None else token_weights.to(dtype)
    loss = torch.zeros((), dtype=dtype, device=q.device)
    d_idx_q, d_idx_k = (torch.zeros(part.shape, dtype=dtype, device=q.device) for part in (idx_q, idx_k))
    for request in batch.requests:
        rows = slice(request.query_begin, request.query_end)
        flat = slice(request.key_row, request.key_row + request.num_keys)
        if block_indices is None:
            positions = torch.arange(request.key_offset, request.key_end, device=q.device)
            chosen = (positions <= batch.limit[rows, None]).expand(num_heads, -1, -1)
        else:
            chosen = _chosen(batch, request, block_indices, block_size)
        keys = k[flat].to(dtype).repeat_interleave(group, 1)
        scores = torch.einsum("thd,jhd->htj", q[rows].to(dtype), keys) * scale
        teacher = torch.exp(scores - lse[rows].T[..., None].to(dtype)).unflatten(0, (num_heads, group)).mean(1)
        teacher = teacher.masked_fill(~chosen, 0.0)
        index_scores = torch.einsum("thd,jd->htj", idx_q[rows].to(dtype), idx_k[flat].to(dtype)) * index_scale
        # A row without a key is NaN until its hidden keys are filled.
        log_q = index_scores.masked_fill(~chosen, -torch.inf).log_softmax(-1).masked_fill(~chosen, 0.0)
        share = weights[rows] / (total_q * num_heads)
        loss += (share[:, None] * torch.xlogy(teacher, teacher).sub(teacher * log_q)).sum()
        dscores = share[:, None] * (torch.where(chosen, log_q.exp(), 0.0) - teacher) * index_scale
        d_idx_q[rows] = torch.einsum("htj,jd->thd", dscores, idx_k[flat].to(dtype))
        d_idx_k[flat] = torch.einsum("htj,thd->jd", dscores, idx_q[rows].to(dtype))
    return loss, d_idx_q.to(idx_q.dtype), d_idx_k.to(idx_k.dtype)
