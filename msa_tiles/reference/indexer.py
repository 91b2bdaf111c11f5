"""Indexer scores with a block max-pool, and selection straight from queries and keys, chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from msa_tiles.quant import dequantize
from msa_tiles.reference.batch import (
    Batch,
    Request,
    accumulator,
    flat_or_paged,
    key_rows,
    read_batch,
    score_width,
)
from msa_tiles.reference.selection import rank_blocks
from msa_tiles.reference.threads import one_thread

# One chunk of products is QUERY_CHUNK * Hi by KEY_CHUNK, 32 MB at four heads: it bounds the memory and stays near the
# caches. index_score and select_blocks must cut alike, so that both see bitwise the same scores.
QUERY_CHUNK = 1024
KEY_CHUNK = 2048


@one_thread()
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
    """``score[h, t, b] = max over the visible tokens j of block b of <idx_q[t, h], idx_k[j]>``: float32 [Hi, T, NB].

    ``idx_q`` [T, Hi, Di]; ``idx_k`` [Tk, Di], or [pages, page, Di] with ``page_table``. ``where`` as in `read_batch`.
    A block without a visible token is -inf; NaN products do not count. Without ``causal`` every key of the request is
    visible, whatever the position. NB is ``num_blocks``, or covers ``max_seqlen_k`` positions. Quantised values are
    those of `quant.dequantize`: ``q_scale`` [], [Hi] or [T, Hi], ``k_scale`` [], [Tk] or [pages, page].
    """
    page_table = where.get("page_table")
    batch = read_batch(idx_q.shape[0], idx_q.device, **flat_or_paged(idx_k, page_table), **where)
    if num_blocks is None:
        num_blocks = score_width(idx_k, block_size, page_table, where.get("max_seqlen_k"), where.get("k_offset"))
    total_q, num_heads, _ = idx_q.shape
    score = torch.full((num_heads, total_q, num_blocks), -torch.inf, dtype=torch.float32, device=idx_q.device)
    values = Values(idx_q, idx_k, q_scale, k_scale)
    for request in batch.requests:
        for begin, end in request.query_chunks(QUERY_CHUNK):
            part = _score_chunk(values, batch, request, begin, end, block_size, causal, page_table)
            width = min(num_blocks, part.shape[2])
            score[:, begin:end, :width] = part[:, :, :width]
    return score


@one_thread()
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
    """`topk_select` of `index_score` without the score matrix: int32 [Hkv, T, topk]."""
    page_table = where.get("page_table")
    batch = read_batch(idx_q.shape[0], idx_q.device, **flat_or_paged(idx_k, page_table), **where)
    total_q, num_heads, _ = idx_q.shape
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    ids = torch.full((num_kv_heads, total_q, topk), -1, dtype=torch.int32, device=idx_q.device)
    valid = batch.num_valid_blocks(block_size)
    values = Values(idx_q, idx_k, q_scale, k_scale)
    for request in batch.requests:
        for begin, end in request.query_chunks(QUERY_CHUNK):
            score = _score_chunk(values, batch, request, begin, end, block_size, True, page_table)
            ids[:, begin:end] = rank_blocks(
                score, valid[begin:end], topk, num_kv_heads, init_blocks, local_blocks, order
            )
    return ids


@dataclass(frozen=True)
class Values:
    """Queries and keys of the indexer, dequantised piece by piece, in the reference's accumulator."""

    idx_q: Tensor
    idx_k: Tensor
    q_scale: Tensor | None
    k_scale: Tensor | None

    def queries(self, rows: slice) -> Tensor:
        """[n, Hi, Di]"""
        queries = self.idx_q[rows].to(accumulator(self.idx_q.dtype))
        if self.q_scale is None:
            return queries
        return dequantize(queries, self.q_scale[rows] if self.q_scale.dim() == 2 else self.q_scale)

    def keys(self, request: Request, begin: int, end: int, page_table: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Keys [end - begin, Di] and which of them are there, as in `key_rows`."""
        keys, present = key_rows(self.idx_k, request, begin, end, page_table)
        keys = keys.to(accumulator(self.idx_q.dtype))
        if self.k_scale is None:
            return keys, present
        scale = self.k_scale
        if scale.dim():
            scale = key_rows(scale[..., None], request, begin, end, page_table)[0][:, 0]
        return dequantize(keys, scale), present


def _score_chunk(
    values: Values,
    batch: Batch,
    request: Request,
    begin: int,
    end: int,
    block_size: int,
    causal: bool,
    page_table: Tensor | None,
) -> Tensor:
    """Scores of the queries [begin, end) of one request over all of its blocks: float32 [Hi, n, blocks]."""
    num_blocks = -(-request.key_end // block_size)
    num_heads, width = values.idx_q.shape[1:]
    device = values.idx_q.device
    queries = values.queries(slice(begin, end)).transpose(0, 1).reshape(-1, width)
    score = torch.full((num_heads, end - begin, num_blocks), -torch.inf, dtype=torch.float32, device=device)
    limit = batch.limit[begin:end]
    first_limit, last_limit = request.key_end - 1, request.key_end - 1
    if causal:
        first_limit, last_limit = int(limit.min()), int(limit.max())
    blocks_per_chunk = max(KEY_CHUNK // block_size, 1)
    for first in range(0, num_blocks, blocks_per_chunk):
        if first * block_size > last_limit:
            break
        last = min(first + blocks_per_chunk, num_blocks)
        row_begin, row_end = request.block_rows(first, block_size)[0], request.block_rows(last - 1, block_size)[1]
        if row_begin == row_end:
            continue
        keys, present = values.keys(request, row_begin, row_end, page_table)
        products = queries @ keys.T
        if present is not None:
            products = products.masked_fill(~present, -torch.inf)
        # Whole blocks, filled with -inf; on the left too, where a shard starts inside a block.
        before = row_begin + request.key_offset - first * block_size
        after = (last - first) * block_size - before - products.shape[1]
        if before or after:
            products = torch.nn.functional.pad(products, (before, after), value=-torch.inf)
        if causal and first_limit < request.key_offset + row_end - 1:
            positions = torch.arange(first * block_size, last * block_size, device=device)
            hidden = positions > limit[:, None]
            products.view(num_heads, end - begin, -1).masked_fill_(hidden, -torch.inf)
        pooled = _block_max(products, block_size)
        score[:, :, first:last] = pooled.view(num_heads, end - begin, last - first)
    return score


def _block_max(products: Tensor, block_size: int) -> Tensor:
    """Maximum over groups of ``block_size`` columns that ignores NaN; -inf when all are NaN."""
    blocks = products.view(products.shape[0], -1, block_size)
    pooled = blocks.amax(-1)
    if bool(pooled.isnan().any()):
        pooled = blocks.masked_fill(blocks.isnan(), -torch.inf).amax(-1)
    return pooled
