"""How the index KL is launched on CUDA: passes over query windows, partial gradients in one bounded workspace.

1. index_lse leaves an LSE of the index scores for every edge (query, slot) of the schedule; merged over the slots, they
   normalise the student.
2. index_kl goes over the main scores, window by window. It adds to the losses, and leaves partial gradients: of idx_q
   for every edge, of idx_k for every task.
3. index_gradients adds them up before the next window overwrites them.

Sums are made in a fixed order everywhere, so that every call repeats bit for bit, whether or not that was asked for.

The whole prefix goes the same way: its blocks are PREFIX_SLOTS slots at a time, which all KV heads share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from msa_tiles.call import backends, validate
from msa_tiles.call.kl import Divergence
from msa_tiles.call.schedule import WindowSchedule
from msa_tiles.launch import lookup, places, schedules, windows
from msa_tiles.launch.attention import LOG2_E
from msa_tiles.launch.places import Place
from msa_tiles.runtime import CallFacts
from msa_tiles.runtime.facts import multiprocessors

# Blocks of the prefix that make up one schedule: the most slots that an edge can name.
PREFIX_SLOTS = 64
# Of the workspace, what the LSE of edges may take: they only live until their merge.
LSE_SHARE = 4
# Windows of one launch of index_lse: they lie along the grid's third axis, which ends there.
MOST_WINDOWS = 65_535
FLOAT_BYTES = 4
# Rows of keys that a CTA of index_gradients adds up (tile.rows of its spec).
SUM_ROWS = 16


def run(call: Divergence, loss: Tensor, d_idx_q: Tensor, d_idx_k: Tensor) -> None:
    """Fill the loss, a scalar, and its gradients, contiguous, where the call wants them.

    They are those of a loss gradient of 1: the pass over the main scores that gives the loss gives them too.
    """
    q, k, idx_q, ids, where = call.q, call.k, call.idx_q, call.block_indices, call.where
    topk = {} if ids is None else {"topk": ids.shape[2]}
    facts = lookup.call_facts(
        "index_kl",
        where,
        q.device,
        lookup.precision(query=q, key_value=k, index_key=call.idx_k),
        {
            "head_dim": q.shape[2],
            "index_dim": idx_q.shape[2],
            "block_size": call.block_size,
            "group": q.shape[1] // k.shape[1],
            "prefix": int(ids is None),
        },
        (q, k, idx_q, call.idx_k),
        lookup.broken_rules("index_kl", **topk),
        queries=q.shape[0],
        heads=q.shape[1],
    )
    # A missing kernel is refused whatever the sizes are.
    lookup.find_kernel(facts, call.backend)
    nothing_selected = ids is not None and ids.numel() == 0
    longest_k = k.shape[0] if where.max_seqlen_k is None else min(k.shape[0], where.max_seqlen_k)
    if nothing_selected or 0 in (q.numel(), k.numel(), where.num_requests, longest_k):
        for result in (loss, d_idx_q, d_idx_k):
            result.zero_()
        return
    at = places.place(where, q.shape[0], k.shape[0], call.block_size, q.device)
    gradients = (d_idx_q, d_idx_k) if call.gradients else (None, None)
    launch(facts, call, at, longest_k, loss, *gradients)


def launch(
    facts: CallFacts,
    call: Divergence,
    at: Place,
    longest_k: int,
    loss: Tensor,
    d_idx_q: Tensor | None,
    d_idx_k: Tensor | None,
) -> None:
    """Fill loss, and d_idx_q and d_idx_k where they are wanted."""
    q, k, idx_q, idx_k, block_indices = call.q, call.k, call.idx_q, call.idx_k, call.block_indices
    backend, block_size, workspace_bytes, index_scale = (
        call.backend, call.block_size, call.workspace_bytes, call.index_scale
    )  # fmt: skip
    total_q, num_kv_heads, index_dim = idx_q.shape
    num_requests = call.where.num_requests
    gradients = d_idx_q is not None
    prefix = block_indices is None
    topk = PREFIX_SLOTS if block_indices is None else block_indices.shape[2]
    # The blocks that the edges of a window can touch in every request.
    reach = min(longest_k, PREFIX_SLOTS * block_size) if prefix else longest_k

    def partial_bytes(window: int, tasks: int) -> int:
        return FLOAT_BYTES * num_kv_heads * index_dim * (window * topk + tasks * block_size) if gradients else 0

    def bytes_of(window: int) -> int:
        return partial_bytes(window, _most_tasks(window * topk, num_requests, reach, block_size))

    window = choose_window(total_q, workspace_bytes, bytes_of)
    schedule = call.schedule
    if schedule is not None and partial_bytes(schedule.window, schedule.tasks.shape[2]) > workspace_bytes:
        # One made for attention, whose partial results are others.
        schedule = None

    def parts_of_selection() -> Iterator[WindowSchedule]:
        if schedule is not None:
            yield schedule
            return
        ids = block_indices
        for first in backends.turns(range(0, -(-longest_k // block_size) if prefix else 1, PREFIX_SLOTS)):
            if prefix:
                slots = torch.arange(first, first + PREFIX_SLOTS, dtype=torch.int32, device=q.device)
                ids = slots.expand(1, total_q, PREFIX_SLOTS)
            assert ids is not None
            made = schedules.allocate(
                ids, num_requests=num_requests, max_seqlen_k=reach, block_size=block_size, window=window
            )
            # Any DSL's: schedules are the same.
            schedules.build(schedules.find(facts, "auto", block_size), ids, at, made)
            yield made

    variant = {"index_dim": index_dim, "block_size": block_size}
    measure = kernel(facts, backend, "index_lse", variant)
    diverge = kernel(facts, backend, "index_kl", facts.variant)
    add = kernel(facts, backend, "index_gradients", variant)
    # One selection has one schedule, for both passes; those of the prefix are made again.
    made = None if prefix else tuple(parts_of_selection())
    index_lse = torch.full((total_q, num_kv_heads), -torch.inf, dtype=torch.float32, device=q.device)
    for part in parts_of_selection() if made is None else made:
        _merge_lse(measure, idx_q, idx_k, part, topk, index_scale, workspace_bytes // LSE_SHARE, index_lse)

    num_tasks = _most_tasks(window * topk, num_requests, reach, block_size)
    if made is not None:
        window, num_tasks = made[0].window, made[0].tasks.shape[2]
    num_ctas = multiprocessors(q.device)
    weights = call.token_weights
    if weights is None:
        weights = torch.ones(total_q, dtype=torch.float32, device=q.device)
    share = 1.0 / (total_q * num_kv_heads)
    rows, partials = (window, num_tasks) if gradients else (1, 1)
    partial_dq = _floats(q, rows, topk, num_kv_heads, index_dim)
    partial_dk = _floats(q, num_kv_heads, partials, block_size, index_dim)
    present = torch.empty((rows, topk, num_kv_heads), dtype=torch.int32, device=q.device)
    sum_q = _floats(q, total_q if prefix else rows, num_kv_heads, index_dim) if gradients else partial_dq
    sum_k = _floats(q, *idx_k.shape).zero_() if gradients else partial_dk
    losses = _floats(q, num_kv_heads, num_tasks, block_size).zero_()
    for turn, part in enumerate(parts_of_selection() if made is None else made):
        number = part.tasks.shape[0]
        claims = torch.zeros(number, dtype=torch.int32, device=q.device)
        for index in backends.turns(range(number)):
            first, count = index * window, min(window, total_q - index * window)
            if gradients:
                present.zero_()
            diverge(
                q,
                k,
                call.lse,
                idx_q,
                idx_k,
                index_lse,
                weights,
                *part[:3],
                claims,
                present,
                losses,
                partial_dq,
                partial_dk,
                call.softmax_scale * LOG2_E,
                index_scale * LOG2_E,
                index_scale * share,
                int(gradients),
                window,
                index,
                num_ctas,
            )
            if d_idx_q is None:
                continue
            sums = sum_q[first : first + count] if prefix else sum_q[:count]
            parts = (partial_dq, present, partial_dk, part.tasks, part.counts)
            add_gradients(add, *parts, at.cu_seqlens_k, sums, sum_k, window_index=index, first=turn == 0)
            if not prefix:
                d_idx_q[first : first + count].copy_(sums)
    torch.mul(losses.sum(), share, out=loss)
    if d_idx_q is not None and d_idx_k is not None:
        if prefix:
            d_idx_q.copy_(sum_q)
        d_idx_k.copy_(sum_k)


def edge_lse(
    kernel: Any, idx_q: Tensor, idx_k: Tensor, part: WindowSchedule, topk: int, scale: float, some: range
) -> Tensor:
    """The index LSE of the edges of some windows, [their queries, topk, Hkv]; -inf where a slot has no edge."""
    total_q, num_kv_heads, _ = idx_q.shape
    count = min(some.stop * part.window, total_q) - some.start * part.window
    lse = idx_q.new_full((count, topk, num_kv_heads), -torch.inf, dtype=torch.float32)
    kernel(idx_q, idx_k, *part[:3], lse, scale * LOG2_E, part.window, some.start, len(some))
    return lse


def _merge_lse(
    kernel: Any, idx_q: Tensor, idx_k: Tensor, part: WindowSchedule, topk: int, scale: float, most: int, into: Tensor
) -> None:
    """Merge the index LSE of a schedule's edges into [T, Hkv], with at most so many bytes of them at a time."""
    number = part.tasks.shape[0]
    together = min(max(1, most // (FLOAT_BYTES * part.window * topk * idx_q.shape[1])), MOST_WINDOWS)
    for first in backends.turns(range(0, number, together)):
        some = range(first, min(first + together, number))
        lse = edge_lse(kernel, idx_q, idx_k, part, topk, scale, some)
        rows = into[first * part.window : first * part.window + len(lse)]
        torch.logaddexp(rows, lse.logsumexp(1), out=rows)


def add_gradients(
    kernel: Any,
    partial_dq: Tensor,
    present: Tensor,
    partial_dk: Tensor,
    tasks: Tensor,
    counts: Tensor,
    cu_seqlens_k: Tensor,
    dq: Tensor,
    dk: Tensor,
    *,
    window_index: int,
    first: bool,
) -> None:
    """Fill dq [n, Hkv, Di], or add to it unless `first`, and add to dk [Tk, Di]."""
    block_size = partial_dk.shape[2]
    places = dk.shape[0] // block_size + cu_seqlens_k.shape[0] - 1
    ctas = dq.shape[0] * dq.shape[1] + places * (block_size // SUM_ROWS)
    kernel(
        partial_dq, present, partial_dk, tasks, counts, cu_seqlens_k, dq, dk, window_index, int(first), ctas
    )  # fmt: skip


def _floats(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


def _most_tasks(edges: int, num_requests: int, longest_k: int, block_size: int) -> int:
    """How many tasks of one head the edges of a window can make."""
    return min(edges, num_requests * -(-longest_k // block_size)) + edges // windows.CHUNK


def choose_window(total_q: int, workspace_bytes: int, bytes_of: Any) -> int:
    """Queries per window, so that what grows with them fits the workspace."""
    window = windows.window_for(total_q, windows.MOST_QUERIES)
    while window > 1 and bytes_of(window) > workspace_bytes:
        window = -(-window // 2)
    if bytes_of(window) > workspace_bytes:
        validate.refuse(
            "workspace", f"{workspace_bytes} bytes", f"at least {bytes_of(1)} for the partial gradients of one query"
        )
    return window


def kernel(facts: CallFacts, backend: str, op: str, variant: Mapping[str, int]) -> Any:
    """The kernel of an operator that serves a call of index_kl."""
    # The features of a call are about its tensors and places; only the schedule tells the helpers where they are.
    features = (
        frozenset()
        if op == "index_gradients"
        else facts.features - {"q_positions"}
        if op != facts.op
        else facts.features
    )
    return lookup.part_kernel(facts, backend, op, variant, features)
