"""How the backward of sparse attention is launched on CUDA: the windows of queries of the forward call's schedule.

gradient_rows tells what is needed of every row. Of every window sparse_attention_backward leaves dQ in parts, one for
every (query, slot) edge, in the workspace, and adds dK and dV to FP32 sums; merge_gradients adds the parts of a query
in the order of its slots. Nothing is added in an order that timing could change, so that there is one mode: every call
repeats bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from msa_tiles.call import validate
from msa_tiles.launch import attention, lookup
from msa_tiles.launch.attention import CHUNK, LOG2_E
from msa_tiles.launch.places import Place
from msa_tiles.runtime import CallFacts

# Tasks of the schedule that one task of the backward takes: its sums of dK and dV leave the registers once.
TASKS = 2

# Kernels count the elements of partial results in int32.
MOST_ELEMENTS = 1 << 31


def sparse_attention_backward(
    facts: CallFacts,
    backend: str,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    block_indices: Tensor,
    dlse: Tensor | None,
    where: Place,
    *,
    block_size: int,
    softmax_scale: float,
    longest_k: int,
    schedule: tuple[Tensor, Tensor, Tensor, int] | None,
    workspace_bytes: int,
    deterministic: bool,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Fill dq, dk and dv, one window of queries after the other; deterministic in any case."""
    main = _find(facts, backend, facts.op, facts.variant)
    merge = _find(facts, backend, "merge_gradients", {"head_dim": q.shape[2]})
    num_kv_heads, total_q, topk = block_indices.shape
    num_q_heads, head_dim = q.shape[1:]
    most = workspace_bytes // bytes_per_query(topk, num_q_heads, num_kv_heads, head_dim, block_size)
    most = min(most, (MOST_ELEMENTS - 1) // (topk * num_q_heads * head_dim))
    if most < 1:
        wanted = bytes_per_query(topk, num_q_heads, num_kv_heads, head_dim, block_size)
        validate.refuse("workspace", f"{workspace_bytes} bytes", f"at least {wanted} for a window of one query")
    if schedule is not None and schedule[3] <= most:
        edges, tasks, counts, window = schedule
    else:
        # A schedule whose windows suit the forward call may be too wide here, by what chunks and marks take.
        window = attention.window_for(total_q, most)
        edges, tasks, counts = attention.allocate_schedule(
            block_indices,
            num_requests=where.cu_seqlens_q.shape[0] - 1,
            max_seqlen_k=longest_k,
            block_size=block_size,
            window=window,
        )
        parts = {"edges": edges, "tasks": tasks, "counts": counts}
        attention.build_schedule(
            facts, block_indices, where, block_size=block_size, window=window, backend=backend, **parts
        )
    total_k = k.shape[0]
    tasks, counts = group_tasks(tasks, counts, total_k, block_size)
    rows = gradient_rows(facts, backend, dout, out, lse, dlse)
    windows = edges.shape[0]
    claims = torch.zeros(windows, dtype=torch.int32, device=q.device)
    partial_dq = q.new_empty((window, topk, num_q_heads, head_dim))
    marks = block_indices.new_zeros((window, num_kv_heads, topk))
    # The rows of keys, then what tasks leave that do not own their block.
    sums = lse.new_empty((2, num_kv_heads, total_k + most_further(window * topk) * block_size, head_dim))
    sums[:, :, :total_k].zero_()
    num_ctas = _num_ctas(q.device)
    scales = softmax_scale, softmax_scale * LOG2_E
    for index in range(windows):
        first, last = index * window, min((index + 1) * window, total_q)
        work = (edges, tasks, counts, claims)
        main(q, dout, k, v, rows, *work, partial_dq, marks, sums, *scales, index, num_ctas)
        merge(partial_dq, marks, tasks, counts, sums, dq[first:last], index, block_size)
    dk.copy_(sums[0, :, :total_k].mul_(softmax_scale).transpose(0, 1))
    dv.copy_(sums[1, :, :total_k].transpose(0, 1))


def bytes_per_query(topk: int, num_q_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> int:
    """What the partial results of one query take: BF16 dQ and a mark for every slot, and its share of the sums."""
    share = -(-topk * num_kv_heads * 2 * block_size * head_dim * 4 // (CHUNK * TASKS))
    return topk * (num_q_heads * head_dim * 2 + num_kv_heads * 4) + share


def most_further(edges: int) -> int:
    """How many tasks of a KV head with so many edges in a window do not own their block.

    A block of n edges has ceil(n / CHUNK) tasks in the schedule, and ceil(n / (CHUNK * TASKS)) here.
    """
    return edges // (CHUNK * TASKS)


def group_tasks(
    tasks: Tensor, counts: Tensor, total_k: int, block_size: int, most: int = TASKS
) -> tuple[Tensor, Tensor]:
    """The schedule's tasks [windows, Hkv, N, 4] as tasks [windows, Hkv, N, 5] of up to ``most`` of them, and how many.

    The fifth number is the row of the sums: that of the keys in the first task of a block in its window, which owns
    them; the others have block_size rows each behind those of all keys. What lies behind the counts is undefined.
    """
    number = tasks.shape[2]
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
    for step in range(1, min(most, number)):
        total[..., :-step] += length[..., step:].masked_fill(row[..., step:] != row[..., :-step], 0)
    further = leads & (before > 0)
    behind = (further.cumsum(-1, dtype=torch.int32) - 1) * block_size + total_k
    made = torch.stack((*tasks[..., :2].unbind(-1), total, tasks[..., 3], torch.where(further, behind, row)), -1)
    # Tasks that lead move to the front, in their order.
    order = (~leads).to(torch.uint8).sort(dim=-1, stable=True).indices
    return made.gather(2, order[..., None].expand(-1, -1, -1, 5)), leads.sum(-1, dtype=torch.int32)


def gradient_rows(
    facts: CallFacts, backend: str, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None
) -> Tensor:
    """LSE in base two and delta of every row, float32 [T, Hq, 2]."""
    kernel = _find(facts, backend, "gradient_rows", {"head_dim": out.shape[2]})
    rows = lse.new_empty((*lse.shape, 2))
    kernel(dout, out, lse, lse if dlse is None else dlse, rows, int(dlse is not None))
    return rows


def merge_gradients(
    facts: CallFacts,
    backend: str,
    partial_dq: Tensor,
    marks: Tensor,
    tasks: Tensor,
    counts: Tensor,
    sums: Tensor,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """dq [T, Hq, D] and the sums [2, Hkv, N, D] of one window, which are added to in place."""
    dq = partial_dq.new_empty((partial_dq.shape[0], *partial_dq.shape[2:]))
    kernel = _find(facts, backend, "merge_gradients", {"head_dim": dq.shape[2]})
    kernel(partial_dq, marks, tasks, counts, sums, dq, 0, block_size)
    return dq, sums


def _num_ctas(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _find(facts: CallFacts, backend: str, op: str, variant: Mapping[str, int]) -> Any:
    # The features of a call are about its own tensors; the parts of gradients are ours.
    features = facts.features if op in (facts.op, "gradient_rows") else frozenset()
    if op == "gradient_rows":
        features = features & {"strided_unaligned"}
    return lookup.part_kernel(facts, backend, op, variant, features)
