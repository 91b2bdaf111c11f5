"""build_schedule: the reverse index of a selection and the work list of the attention kernels."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from msa_tiles import reference
from msa_tiles.call import contents, validate
from msa_tiles.call.schedule import Schedule
from msa_tiles.call.where import ARGUMENTS, Where
from msa_tiles.launch import attention, lookup, places, shards
from msa_tiles.library import registration


def build_schedule(
    block_indices: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    page_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    q_positions: Tensor | None = None,
    k_offset: Tensor | None = None,
    check: bool = False,
    block_size: int = 128,
) -> Schedule:
    """The reverse index of ``block_indices`` int32 [Hkv, T, k], for `sparse_attention` with the same lengths.

    Without key lengths a request has as many keys as queries: where one sequence has more keys, ``cu_seqlens_k``
    [0, Tk] tells. Ids that are negative, past the request's keys or past the query's position make no edge. Runs on
    the device of the ids.
    """
    where = Where(cu_seqlens_q, cu_seqlens_k, page_table, seqused_k, max_seqlen_q, max_seqlen_k, q_positions, k_offset)
    return build_on("auto", block_indices, where, block_size, check)


def build_on(backend: str, block_indices: Tensor, where: Where, block_size: int, check: bool = False) -> Schedule:
    """`build_schedule` by the kernel of one DSL; ``auto`` and ``reference`` are the reference for CPU tensors."""
    validate.tensor("block_indices", block_indices, "[Hkv, T, k]")
    validate.int32("block_indices", block_indices, [None, None, None], "[Hkv, T, k]", block_indices, "block_indices")
    validate.integer("block_size", block_size, 1)
    validate.backend(backend, block_indices.device)
    where.validate(block_indices.shape[1], block_indices, "block_indices", None)
    if check:
        contents.check_where(where, block_indices.shape[1], None)
        shards.check_offsets(where, block_size, backend, block_indices.device)
        contents.check_block_indices(block_indices, where, block_size, None)
    _, total_q, topk = block_indices.shape
    window = total_q
    if block_indices.device.type == "cuda":
        window = attention.choose_window(block_indices)
    edges, tasks, counts = _OPERATOR.functional(block_indices, *where.arguments(), block_size, window, backend)
    max_pages = 0 if where.page_table is None else where.page_table.shape[1]
    sharded, counted = where.k_offset is not None, where.cu_seqlens_k is not None or where.seqused_k is not None
    return Schedule(edges, tasks, counts, window, topk, block_size, total_q, max_pages, sharded, counted)


def _allocate(block_indices: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *place, block_size, window, _backend = rest
    where = Where(*place)
    num_kv_heads, total_q, topk = block_indices.shape
    if block_indices.device.type == "cuda":
        return attention.allocate_schedule(
            block_indices,
            num_requests=where.num_requests,
            max_seqlen_k=where.max_seqlen_k,
            block_size=block_size,
            window=window,
        )
    edges = block_indices.new_empty((1, num_kv_heads, total_q * topk))
    tasks = block_indices.new_empty((1, num_kv_heads, total_q * topk, 4))
    return edges, tasks, block_indices.new_empty((1, num_kv_heads, 2))


def _write(block_indices: Tensor, *rest: Any) -> None:
    *place, block_size, window, backend, edges, tasks, counts = rest
    where = Where(*place)
    if block_indices.device.type != "cuda":
        parts = reference.build_schedule(block_indices, block_size=block_size, **where.keywords())
        for destination, part in zip((edges, tasks, counts), parts, strict=True):
            destination.copy_(part)
        return
    variant = {"block_size": block_size}
    refusals = lookup.broken_rules("build_schedule", topk=block_indices.shape[2])
    refusals += lookup.oversized_table(where, block_size)
    # Paged keys matter to the attention kernel; the reverse index only names their rows.
    facts = lookup.call_facts(
        "build_schedule",
        where.without_pages(),
        block_indices.device,
        "bf16",
        variant,
        refusals=refusals,
        queries=block_indices.shape[1],
        heads=block_indices.shape[0],
    )
    if block_indices.numel() == 0 or where.num_requests == 0 or where.max_seqlen_k == 0:
        counts.zero_()
        return
    attention.build_schedule(
        facts,
        block_indices,
        places.place(where, block_indices.shape[1], None, block_size, block_indices.device),
        block_size=block_size,
        window=window,
        edges=edges,
        tasks=tasks,
        counts=counts,
        backend=backend,
    )


_OPERATOR = registration.define(
    "build_schedule",
    f"Tensor block_indices, {ARGUMENTS}, SymInt block_size, SymInt window, str backend",
    ("edges", "tasks", "counts"),
    _allocate,
    shards.schedule(_write),
)
