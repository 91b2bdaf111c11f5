"""A selection inverted, as MiniMax's ``fmha_sm100`` has it: for every block of keys the queries that selected it.

Rows are the blocks of all requests: the first block of every request that has one, the second ones, and so on. A row
holds numbers of queries in their request, ascending. Nothing here synchronises.
"""

from __future__ import annotations

import torch
from torch import Tensor

from msa_tiles.call import validate
from msa_tiles.compat import packed, positions


def row_numbers(cu_seqlens_k: Tensor, block_size: int, levels: int) -> tuple[Tensor, Tensor]:
    """The row of block l of request b, int64 [levels, B], and whether there is such a block, bool of that shape."""
    blocks = (cu_seqlens_k.diff() + block_size - 1).div(block_size, rounding_mode="floor")
    exists = torch.arange(levels, device=blocks.device)[:, None] < blocks
    return exists.flatten().cumsum(0).view(exists.shape) - 1, exists


def invert(
    block_indices: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, block_size: int, levels: int, total_rows: int
) -> tuple[Tensor, Tensor]:
    """Of ids int32 [Hkv, T, k]: where rows begin, int32 [Hkv, total_rows + 1], and queries, int32 [Hkv, T * k].

    Behind the last query is -1. Ids of no block of the request are left out.
    """
    heads, total_q, topk = block_indices.shape
    rows, exists = row_numbers(cu_seqlens_k, block_size, levels)
    request = positions.requests(cu_seqlens_q, total_q)[:, None].expand(total_q, topk)
    ids = block_indices.clamp(0, max(levels - 1, 0)).long()
    real = torch.arange(total_q, device=ids.device)[:, None] < cu_seqlens_q[-1]
    valid = (block_indices >= 0) & (block_indices < levels) & real
    if levels and exists.shape[1]:
        valid &= exists[ids, request]
        found = rows[ids, request]
    else:
        valid, found = torch.zeros_like(valid), torch.zeros_like(ids)
    found = torch.where(valid, found, total_rows).view(heads, total_q * topk)
    counts = torch.zeros(heads, total_rows + 1, dtype=torch.int32, device=ids.device)
    counts.scatter_add_(1, found, torch.ones_like(found, dtype=torch.int32))
    starts = torch.zeros_like(counts)
    starts[:, 1:] = counts[:, :-1].cumsum(1, dtype=torch.int32)
    order = found.argsort(dim=1, stable=True)
    local = positions.at(0, cu_seqlens_q, total_q)[:, None].expand(total_q, topk).reshape(-1)
    place = torch.arange(total_q * topk, device=ids.device)
    return starts, torch.where(place < starts[:, -1:], local[order], -1)


def selected(
    starts: Tensor,
    queries: Tensor,
    topk: int,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    block_size: int,
    levels: int,
    total_q: int,
) -> Tensor:
    """The ids that `invert` was made of: int32 [Hkv, total_q, topk], ascending, -1 behind.

    Raises ``ValueError`` or ``TypeError`` for other shapes, with the names of ``fmha_sm100``.
    """
    heads, edges = validate.tensor("k2q_q_indices", queries, "[Hkv, T * k]").shape
    total_rows = validate.shaped("k2q_row_ptr", starts, [heads, None], "[Hkv, total_rows + 1]").shape[1] - 1
    if total_rows < 0:
        validate.refuse("k2q_row_ptr", f"shape [{heads}, 0]", "[Hkv, total_rows + 1], at least one element for a head")
    validate.shaped("cu_seqlens_k", cu_seqlens_k, [packed.num_requests(cu_seqlens_q) + 1], "[B + 1]")
    ids = torch.full((heads, total_q + 1, topk + 1), -1, dtype=torch.int32, device=queries.device)
    if not (edges and total_rows and levels and cu_seqlens_k.shape[0] > 1):
        return ids[:, :total_q, :topk]
    rows, exists = row_numbers(cu_seqlens_k, block_size, levels)
    inside = torch.where(exists & (rows < total_rows), rows, total_rows).flatten()
    # For each row its block and its request; what has no row writes behind the last one.
    grid = torch.arange(exists.numel(), device=queries.device)
    cell = torch.zeros(total_rows + 1, dtype=torch.int64, device=queries.device).scatter_(0, inside, grid)
    place = torch.arange(edges, device=queries.device).expand(heads, edges)
    row = torch.searchsorted(starts[:, 1:].contiguous().long(), place.contiguous(), right=True).clamp_(max=total_rows)
    block = cell[row].div(exists.shape[1], rounding_mode="floor")
    query = queries.long() + cu_seqlens_q[:-1].long()[cell[row] % exists.shape[1]]
    valid = (place < starts[:, -1:]) & (queries >= 0) & (row < total_rows) & (query < total_q)
    query = torch.where(valid, query, total_q)
    # Edges are in the order of rows: that of a query's blocks. Its slot is how many of its edges come before.
    order = query.argsort(dim=1, stable=True)
    ranked = query.gather(1, order)
    first = torch.searchsorted(ranked, torch.arange(total_q + 1, device=queries.device).expand(heads, -1).contiguous())
    slot = (place - first.gather(1, ranked)).clamp_(max=topk)
    flat = ids.view(heads, -1)
    flat.scatter_(1, ranked * (topk + 1) + slot, block.gather(1, order).to(torch.int32))
    return ids[:, :total_q, :topk].contiguous()
