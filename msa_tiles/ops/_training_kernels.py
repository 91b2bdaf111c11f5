"""How the kernels of training are launched on CUDA.

The backward of sparse attention goes through the windows of queries of the forward call's schedule. Of every window the
main kernel leaves dQ in parts, one for every (query, slot) edge, and dK and dV in FP32 sums; merge_gradients adds the
parts of a query in the order of its slots. Nothing is added in an order that timing could change, so that there is one
mode: every call repeats bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Tasks of the schedule that one task of the backward takes: its sums of dK and dV leave the registers once.
TASKS = 2


def group_tasks(tasks: Tensor, counts: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The schedule's tasks [windows, Hkv, N, 4] as tasks [windows, Hkv, N, 5] of up to ``most`` of them, and how many.

    The fifth number is -1 in the first task of a block in its window, which owns the sums of the block; the others
    write theirs as chunks of that number, counted from 0 in each window. ``N`` may be more than what ``counts`` uses;
    what lies behind is undefined.
    """
    windows, heads, number, _ = tasks.shape
    index = torch.arange(number, device=tasks.device)
    used = index < counts[..., None]
    row = tasks[..., 0].masked_fill(~used, -1)
    begins = torch.ones_like(used)
    begins[..., 1:] = row[..., 1:] != row[..., :-1]
    # How many tasks of its block stand before a task.
    before = index - (index * begins).cummax(-1).values
    leads = used & (before % most == 0)
    length = tasks[..., 2].masked_fill(~used, 0)
    total = length.clone()
    for step in range(1, most):
        total[..., :-step] += length[..., step:].masked_fill(row[..., step:] != row[..., :-step], 0)
    further = leads & (before > 0)
    chunk = further.flatten(1).cumsum(1).view(windows, heads, number) - 1
    chunk = chunk.masked_fill(~further, -1)
    made = torch.stack((tasks[..., 0], tasks[..., 1], total, tasks[..., 3], chunk.to(torch.int32)), -1)
    # Tasks that lead move to the front, the others behind them.
    order = (~leads).to(torch.uint8).sort(dim=-1, stable=True).indices
    made = made.gather(2, order[..., None].expand(-1, -1, -1, 5))
    return made, leads.sum(-1, dtype=torch.int32)


def most_chunks(edges: int, num_kv_heads: int, chunk: int, most: int) -> int:
    """How many chunks a window can have whose heads have so many edges, in tasks of up to ``chunk`` edges.

    A chunk follows ``most`` whole pieces of its block.
    """
    return num_kv_heads * (edges // (chunk * most))
