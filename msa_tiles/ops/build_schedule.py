"""build_schedule: the reverse index of a selection and the work list of the attention kernels."""

from __future__ import annotations

from torch import Tensor

from msa_tiles import reference
from msa_tiles.call import backends, contents, validate
from msa_tiles.call.schedule import Schedule, ScheduleCall
from msa_tiles.call.where import Where
from msa_tiles.launch import schedules, shards
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
    block_size, where = validate.plain(block_size), where.plain()
    validate.integer("block_size", block_size, 1, validate.LARGEST_BLOCK)
    backends.check(backend, block_indices.device)
    where.validate(block_indices.shape[1], block_indices, "block_indices", None)
    if validate.boolean("check", check):
        contents.check_where(where, block_indices.shape[1], None)
        contents.check_offsets(where, block_size, backend, block_indices.device)
        contents.check_block_indices(block_indices, where, block_size, None)
    _, total_q, topk = block_indices.shape
    window = schedules.choose_window(block_indices) if backends.has_kernels(block_indices.device) else total_q
    edges, tasks, counts = _OPERATOR.functional(ScheduleCall(block_indices, where, block_size, window, backend))
    max_pages = 0 if where.page_table is None else where.page_table.shape[1]
    sharded, counted = where.k_offset is not None, where.cu_seqlens_k is not None or where.seqused_k is not None
    return Schedule(edges, tasks, counts, window, topk, block_size, total_q, max_pages, sharded, counted)


def _allocate(call: ScheduleCall) -> tuple[Tensor, ...]:
    block_indices, where = call.block_indices, call.where
    if backends.has_kernels(block_indices.device):
        return schedules.allocate(
            block_indices,
            num_requests=where.num_requests,
            max_seqlen_k=where.max_seqlen_k,
            block_size=call.block_size,
            window=call.window,
        )[:3]
    num_kv_heads, total_q, topk = block_indices.shape
    edges = block_indices.new_empty((1, num_kv_heads, total_q * topk))
    tasks = block_indices.new_empty((1, num_kv_heads, total_q * topk, 4))
    return edges, tasks, block_indices.new_empty((1, num_kv_heads, 2))


def _by_reference(call: ScheduleCall, *outputs: Tensor) -> None:
    made = reference.build_schedule(call.block_indices, block_size=call.block_size, **call.where.keywords())
    for destination, part in zip(outputs, made, strict=True):
        destination.copy_(part)


_OPERATOR = registration.define(
    "build_schedule",
    ScheduleCall,
    ("edges", "tasks", "counts"),
    allocate=_allocate,
    reference=_by_reference,
    kernels=shards.schedule(schedules.run),
)
