"""The edges of a schedule, decoded, and those that block ids make."""

from __future__ import annotations

import torch
from torch import Tensor

from msa_tiles.call.schedule import Schedule, WindowSchedule
from msa_tiles.reference.batch import Batch

# Fields of an edge in the schedules of the CUDA kernels: query in its window, slot, last visible token of the block.
_QUERY_SHIFT, _SLOT_SHIFT, _LAST_MASK = 13, 7, 127


def is_of_kernels(made: Schedule | WindowSchedule) -> bool:
    """Whether kernels made a schedule: the reference counts edges beside tasks."""
    return made.counts.dim() == 2


def decoded(made: Schedule | WindowSchedule, topk: int) -> tuple[Tensor, Tensor]:
    """Edges int64 [E, 5] in the schedule's order, and tasks [N, 2]: number of edges, rows of keys.

    An edge is (KV head, query, slot, first key row or block, visible tokens); what lies behind the counts is undefined
    and left out. A schedule of the reference has request and block where one of the kernels has the key row, and tells
    neither visible tokens nor rows: both are 0 then.
    """
    of_kernels = is_of_kernels(made)
    counts = made.counts if of_kernels else made.counts[..., 0]
    used = torch.arange(made.tasks.shape[2], device=counts.device) < counts[..., None]
    window, head, _ = used.nonzero().unbind(1)
    tasks = made.tasks[used].to(torch.int64)
    length = tasks[:, 2] if of_kernels else tasks[:, 3]
    first = tasks[:, 1] if of_kernels else tasks[:, 2]
    owner = torch.arange(len(tasks), device=counts.device).repeat_interleave(length)
    within = torch.arange(len(owner), device=counts.device) - (length.cumsum(0) - length)[owner]
    edges = made.edges[window[owner], head[owner], first[owner] + within].to(torch.int64)
    if of_kernels:
        query = (edges >> _QUERY_SHIFT) + window[owner] * made.window
        slot, visible = (edges >> _SLOT_SHIFT) & ((1 << (_QUERY_SHIFT - _SLOT_SHIFT)) - 1), (edges & _LAST_MASK) + 1
        place, rows = tasks[owner, 0], tasks[:, 3] >> 1
    else:
        query, slot, visible = edges // topk, edges % topk, torch.zeros_like(edges)
        place, rows = (tasks[owner, 0] << 32) + tasks[owner, 1], torch.zeros_like(length)
    return torch.stack((head[owner], query, slot, place, visible), 1), torch.stack((length, rows), 1)


def of_ids(block_indices: Tensor, batch: Batch, block_size: int, starts: Tensor | None) -> Tensor:
    """The edges [E, 5] of ids [Hkv, T, k], by head, query and slot.

    ``starts`` int64 [B] is the row where each request's keys begin, None for edges as the reference has them. In front
    of a shard kernels see no blocks.
    """
    ids = block_indices.to(torch.int64)
    seen = (ids >= 0) & (ids * block_size <= batch.limit[:, None]) & (batch.request[:, None] >= 0)
    if starts is not None:
        offsets = starts.new_tensor([*(request.key_offset for request in batch.requests), 0])
        seen &= ids * block_size >= offsets[batch.request][:, None]
    head, query, slot = seen.nonzero().unbind(1)
    request, block = batch.request[query], ids[seen]
    if starts is None:
        place, visible = (request << 32) + block, torch.zeros_like(block)
    else:
        begin = block * block_size
        place = starts[request] + begin - offsets[request]
        visible = (batch.limit[query] - begin + 1).clamp_max(block_size)
    return torch.stack((head, query, slot, place, visible), 1)


def by_query(edges: Tensor, total_q: int, topk: int) -> Tensor:
    """What the edges of one head select, int64 [T, k]: the same for the same blocks, in whichever slots they stand."""
    _, query, slot, place, visible = edges.unbind(1)
    # Of the reference's edges visible is 0, and of the kernels' at most 128, of rows below 2**31.
    selected = torch.full((total_q, topk), -1, dtype=torch.int64, device=edges.device)
    selected[query, slot] = torch.where(visible > 0, (place << 8) + visible, place)
    return selected.sort(-1).values
