"""Decode a schedule and compare it with the block ids that it was made from."""

from __future__ import annotations

import torch
from torch import Tensor

from msa_tiles.ops import Schedule
from msa_tiles.reference.batch import read_batch
from msa_tiles.verify import compare
from msa_tiles.verify.cases import Disagreement
from msa_tiles.verify.inputs import Lengths

# Fields of an edge in the schedules of the CUDA kernels: query in its window, slot, last visible token of the block.
_QUERY_SHIFT, _SLOT_SHIFT, _LAST_MASK = 13, 7, 127


def defined_parts(schedule: Schedule) -> tuple[Tensor, Tensor]:
    """Edges int64 [E, 5] in the schedule's order, and tasks [N, 2]: number of edges, rows of keys.

    An edge is (KV head, query, slot, first key row or block, visible tokens); what lies behind the counts is undefined
    and left out. A schedule of the reference has request and block where one of the kernels has the key row, and tells
    neither visible tokens nor rows: both are 0 then.
    """
    counts = schedule.counts if schedule.counts.dim() == 2 else schedule.counts[..., 0]
    used = torch.arange(schedule.tasks.shape[2], device=counts.device) < counts[..., None]
    window, head, _ = used.nonzero().unbind(1)
    tasks = schedule.tasks[used].to(torch.int64)
    length = tasks[:, 2] if schedule.edges.is_cuda else tasks[:, 3]
    first = tasks[:, 1] if schedule.edges.is_cuda else tasks[:, 2]
    owner = torch.arange(len(tasks), device=counts.device).repeat_interleave(length)
    within = torch.arange(len(owner), device=counts.device) - (length.cumsum(0) - length)[owner]
    edges = schedule.edges[window[owner], head[owner], first[owner] + within].to(torch.int64)
    if schedule.edges.is_cuda:
        query = (edges >> _QUERY_SHIFT) + window[owner] * schedule.window
        slot, visible = (edges >> _SLOT_SHIFT) & ((1 << (_QUERY_SHIFT - _SLOT_SHIFT)) - 1), (edges & _LAST_MASK) + 1
        place, rows = tasks[owner, 0], tasks[:, 3] >> 1
    else:
        query, slot, visible = edges // schedule.topk, edges % schedule.topk, torch.zeros_like(edges)
        place, rows = (tasks[owner, 0] << 32) + tasks[owner, 1], torch.zeros_like(length)
    return torch.stack((head[owner], query, slot, place, visible), 1), torch.stack((length, rows), 1)


def check(parts: tuple[Tensor, ...], ids: Tensor, block_size: int, lengths: Lengths) -> compare.Errors:
    """Every visible id is one edge of a task of its block, and there is nothing else.

    Raises Disagreement.
    """
    edges, tasks = parts
    batch = read_batch(ids.shape[1], ids.device, **lengths.keywords())
    wide = ids.to(torch.int64)
    seen = (wide >= 0) & (wide * block_size <= batch.limit[:, None]) & (batch.request[:, None] >= 0)
    head, query, slot = seen.nonzero().unbind(1)
    request, block = batch.request[query], wide[seen]
    if ids.is_cuda:
        place = lengths.cu_seqlens_k.to(torch.int64)[request] + block * block_size
        visible = (batch.limit[query] - block * block_size + 1).clamp_max(block_size)
    else:
        place, visible = (request << 32) + block, torch.zeros_like(block)
    wanted = torch.stack((head, query, slot, place, visible), 1)
    errors = compare.same("edges", _sorted(edges), _sorted(wanted))
    if bool((tasks[:, 0] <= 0).any()):
        raise Disagreement("tasks: one has no edges")
    return errors


def _sorted(edges: Tensor) -> Tensor:
    """Rows in the order of (head, query, slot), which names an edge."""
    if len(edges) == 0:
        return edges
    queries, slots = int(edges[:, 1].max()) + 1, int(edges[:, 2].max()) + 1
    return edges[((edges[:, 0] * queries + edges[:, 1]) * slots + edges[:, 2]).argsort(stable=True)]
