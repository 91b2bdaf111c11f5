"""How a schedule is made on CUDA: the queries that read each block, in windows of queries."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from msa_tiles.call.schedule import ScheduleCall, WindowSchedule
from msa_tiles.call.workspace import WORKSPACE_BYTES
from msa_tiles.launch import lookup, places, windows, workspaces
from msa_tiles.launch.places import Place
from msa_tiles.runtime import CallFacts


def choose_window(block_indices: Tensor) -> int:
    """Queries per window of a schedule that is made before its attention is known.

    The largest attention that kernels serve, 16 query heads of dim 128 per KV head, fits the default workspace.
    """
    num_kv_heads, total_q, topk = block_indices.shape
    most = WORKSPACE_BYTES // workspaces.partial_bytes(
        max(topk, 1), max(num_kv_heads, 1) * windows.LARGEST_GROUP, windows.LARGEST_HEAD_DIM
    )
    return windows.window_for(total_q, max(most, 1))


def allocate(
    block_indices: Tensor, *, num_requests: int, max_seqlen_k: int | None, block_size: int, window: int
) -> WindowSchedule:
    """Uninitialised edges [windows, Hkv, window * k], tasks [windows, Hkv, most tasks, 4] and counts [windows, Hkv].

    Sizes may be symbolic.
    """
    num_kv_heads, total_q, topk = block_indices.shape
    number = (total_q + window - 1) // window
    tasks = _most_blocks(window * topk, num_requests, max_seqlen_k, block_size) + window * topk // windows.CHUNK
    return WindowSchedule(
        block_indices.new_empty((number, num_kv_heads, window * topk)),
        block_indices.new_empty((number, num_kv_heads, tasks, 4)),
        block_indices.new_empty((number, num_kv_heads)),
        window,
    )


def _most_blocks(edges: int, num_requests: int, max_seqlen_k: int | None, block_size: int) -> int:
    """How many blocks the edges of one window and head can touch."""
    if max_seqlen_k is None:
        return edges
    return min(edges, num_requests * ((max_seqlen_k + block_size - 1) // block_size))


def find(facts: CallFacts, backend: str, block_size: int) -> Any:
    """The kernel that makes schedules."""
    return lookup.part_kernel(facts, backend, "build_schedule", {"block_size": block_size}, frozenset())


def build(kernel: Any, block_indices: Tensor, at: Place, made: WindowSchedule) -> None:
    """Fill the tensors of a schedule."""
    kernel(
        block_indices,
        at.cu_seqlens_q,
        at.cu_seqlens_k,
        at.seqused_k,
        at.q_positions,
        made.edges,
        made.tasks,
        made.counts,
        at.use_seqused,
        at.use_positions,
        made.window,
    )


def run(call: ScheduleCall, edges: Tensor, tasks: Tensor, counts: Tensor) -> None:
    """Fill the schedule of a call of build_schedule."""
    block_indices, where, block_size = call.block_indices, call.where, call.block_size
    total_q, topk = block_indices.shape[1:]
    refusals = lookup.broken_rules("build_schedule", topk=topk) + lookup.oversized_table(where, block_size)
    # Paged keys matter to the attention kernel; the reverse index only names their rows.
    facts = lookup.call_facts(
        "build_schedule",
        where.without_pages(),
        block_indices.device,
        "bf16",
        {"block_size": block_size},
        refusals=refusals,
        queries=total_q,
        heads=block_indices.shape[0],
    )
    if block_indices.numel() == 0 or where.num_requests == 0 or where.max_seqlen_k == 0:
        counts.zero_()
        return
    at = places.place(where, total_q, None, block_size, block_indices.device)
    build(find(facts, call.backend, block_size), block_indices, at, WindowSchedule(edges, tasks, counts, call.window))
