"""The reverse index: which queries read each KV block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from msa_tiles.reference.batch import read_batch
from msa_tiles.reference.threads import one_thread

# Queries per task. It bounds what blockwise attention gathers at once for a block that every query reads.
MAX_TASK_EDGES = 512


@one_thread()
def build_schedule(block_indices: Tensor, *, block_size: int = 128, **where: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Edges sorted by block then query, per KV head, and the tasks that cut them: one window over all queries.

    ``block_indices`` int32 [Hkv, T, k]; ``where`` as in `read_batch`, without key lengths a request has as many keys as
    queries. An id that is negative, past the request's keys or past the query's limit makes no edge. Returns

    - ``edges`` int32 [1, Hkv, T * k]: query * k + slot, grouped by (request, block), queries ascending, -1 behind,
    - ``tasks`` int32 [1, Hkv, T * k, 4]: request, block, first edge, number of edges (at most `MAX_TASK_EDGES`),
    - ``counts`` int32 [1, Hkv, 2]: number of tasks, number of edges.
    """
    num_kv_heads, total_q, topk = block_indices.shape
    device = block_indices.device
    batch = read_batch(total_q, device, **where)
    ids = block_indices.to(torch.int64)
    visible = (ids >= 0) & (ids * block_size <= batch.limit[:, None]) & (batch.request[:, None] >= 0)
    edges = torch.full((1, num_kv_heads, total_q * topk), -1, dtype=torch.int32, device=device)
    tasks = torch.full((1, num_kv_heads, total_q * topk, 4), -1, dtype=torch.int32, device=device)
    counts = torch.zeros((1, num_kv_heads, 2), dtype=torch.int32, device=device)
    # Groups are numbered request * blocks + block.
    blocks = max((-(-request.key_end // block_size) for request in batch.requests), default=0)
    for head in range(num_kv_heads):
        edge = visible[head].flatten().nonzero().flatten()
        group = batch.request[edge // topk] * blocks + ids[head].flatten()[edge]
        group, order = group.sort(stable=True)
        edges[0, head, : len(edge)] = edge[order]
        rows = _cut(group, blocks)
        tasks[0, head, : len(rows)] = rows.to(torch.int32)
        counts[0, head, 0], counts[0, head, 1] = len(rows), len(edge)
    return edges, tasks, counts


def _cut(group: Tensor, blocks: int) -> Tensor:
    """Tasks int64 [n, 4] of a sorted list of groups."""
    groups, sizes = group.unique_consecutive(return_counts=True)
    chunks = torch.div(sizes + MAX_TASK_EDGES - 1, MAX_TASK_EDGES, rounding_mode="floor")
    owner = torch.arange(len(groups), device=group.device).repeat_interleave(chunks)
    # The number of a task inside its group: its number in the list less the number of the group's first task.
    within = torch.arange(len(owner), device=group.device) - (chunks.cumsum(0) - chunks)[owner]
    first = (sizes.cumsum(0) - sizes)[owner] + within * MAX_TASK_EDGES
    length = (sizes[owner] - within * MAX_TASK_EDGES).clamp_max(MAX_TASK_EDGES)
    divisor = max(blocks, 1)
    return torch.stack((groups[owner] // divisor, groups[owner] % divisor, first, length), dim=1)
