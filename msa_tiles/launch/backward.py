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

from msa_tiles.call import backends, validate
from msa_tiles.call.attention import Gradients
from msa_tiles.launch import lookup, places, schedules, windows
from msa_tiles.launch.attention import LOG2_E
from msa_tiles.launch.places import Place
from msa_tiles.runtime import CallFacts
from msa_tiles.runtime.facts import multiprocessors

# Tasks of the schedule that one task of the backward takes: its sums of dK and dV leave the registers once.
TASKS = 2

# Kernels count the elements of partial results in int32.
MOST_ELEMENTS = 1 << 31


def run(call: Gradients, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Fill the gradients of a call, all of their rows: contiguous, they hold anything before.

    A row whose lse is -inf gets 0 and gives nothing, though its ``dout`` and ``dlse`` may hold NaN.
    """
    q, k, where, block_size = call.q, call.k, call.where, call.block_size
    facts = lookup.call_facts(
        "sparse_attention_backward",
        where,
        q.device,
        lookup.precision(query=q, key_value=k),
        {"head_dim": q.shape[2], "block_size": block_size, "group": q.shape[1] // k.shape[1]},
        (call.dout, q, k, call.v, call.out),
        lookup.broken_rules("sparse_attention_backward", topk=call.block_indices.shape[2]),
        queries=q.shape[0],
        heads=q.shape[1],
    )
    longest_k = k.shape[0] if where.max_seqlen_k is None else min(k.shape[0], where.max_seqlen_k)
    # A missing kernel is refused whatever the sizes are.
    lookup.find_kernel(facts, call.backend)
    if 0 in (q.numel(), k.numel(), call.block_indices.numel(), where.num_requests, longest_k):
        for gradient in (dq, dk, dv):
            gradient.zero_()
        return
    at = places.place(where, q.shape[0], k.shape[0], block_size, q.device)
    launch(facts, call, at, longest_k, dq, dk, dv)


def launch(facts: CallFacts, call: Gradients, at: Place, longest_k: int, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Fill dq, dk and dv, one window of queries after the other; deterministic in any case."""
    q, dout, k, v, lse, block_indices = call.q, call.dout, call.k, call.v, call.lse, call.block_indices
    backend, block_size, softmax_scale = call.backend, call.block_size, call.softmax_scale
    main = _find(facts, backend, facts.op, facts.variant)
    merge = _find(facts, backend, "merge_gradients", {"head_dim": q.shape[2]})
    num_kv_heads, total_q, topk = block_indices.shape
    num_q_heads, head_dim = q.shape[1:]
    most = call.workspace_bytes // bytes_per_query(topk, num_q_heads, num_kv_heads, head_dim, block_size)
    most = min(most, (MOST_ELEMENTS - 1) // (topk * num_q_heads * head_dim))
    if most < 1:
        wanted = bytes_per_query(topk, num_q_heads, num_kv_heads, head_dim, block_size)
        came = f"{call.workspace_bytes} bytes"
        validate.refuse("workspace", came, f"at least {wanted} for a window of one query")
    made = call.schedule
    if made is None or made.window > most:
        # A schedule whose windows suit the forward call may be too wide here, by what chunks and marks take.
        made = schedules.allocate(
            block_indices,
            num_requests=call.where.num_requests,
            max_seqlen_k=longest_k,
            block_size=block_size,
            window=windows.window_for(total_q, most),
        )
        schedules.build(schedules.find(facts, backend, block_size), block_indices, at, made)
    edges, window = made.edges, made.window
    total_k = k.shape[0]
    tasks, counts = group_tasks(made.tasks, made.counts, total_k, block_size)
    rows = gradient_rows(facts, backend, dout, call.out, lse, call.dlse)
    claims = torch.zeros(edges.shape[0], dtype=torch.int32, device=q.device)
    partial_dq = q.new_empty((window, topk, num_q_heads, head_dim))
    marks = block_indices.new_zeros((window, num_kv_heads, topk))
    # The rows of keys, then what tasks leave that do not own their block.
    sums = lse.new_empty((2, num_kv_heads, total_k + most_further(window * topk) * block_size, head_dim))
    sums[:, :, :total_k].zero_()
    num_ctas = _num_ctas(q.device)
    scales = softmax_scale, softmax_scale * LOG2_E
    for index in backends.turns(range(edges.shape[0])):
        first, last = index * window, min((index + 1) * window, total_q)
        work = (edges, tasks, counts, claims)
        main(q, dout, k, v, rows, *work, partial_dq, marks, sums, *scales, index, num_ctas)
        merge(partial_dq, marks, tasks, counts, sums, dq[first:last], index, block_size)
    dk.copy_(sums[0, :, :total_k].mul_(softmax_scale).transpose(0, 1))
    dv.copy_(sums[1, :, :total_k].transpose(0, 1))


def bytes_per_query(topk: int, num_q_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> int:
    """What the partial results of one query take: BF16 dQ and a mark for every slot, and its share of the sums."""
    share = -(-topk * num_kv_heads * 2 * block_size * head_dim * 4 // (windows.CHUNK * TASKS))
    return topk * (num_q_heads * head_dim * 2 + num_kv_heads * 4) + share


def most_further(edges: int) -> int:
    """How many tasks of a KV head with so many edges in a window do not own their block.

    A block of n edges has ceil(n / CHUNK) tasks in the schedule, and ceil(n / (CHUNK * TASKS)) here.
    """
    return edges // (windows.CHUNK * TASKS)


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
    return multiprocessors(device)


def _find(facts: CallFacts, backend: str, op: str, variant: Mapping[str, int]) -> Any:
    # The features of a call are about its own tensors; the parts of gradients are ours.
    features = facts.features if op in (facts.op, "gradient_rows") else frozenset()
    if op == "gradient_rows":
        features = features & {"strided_unaligned"}
    return lookup.part_kernel(facts, backend, op, variant, features)
