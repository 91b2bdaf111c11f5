"""sparse_attention: exact attention over each query's selected KV blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from msa_tiles import reference
from msa_tiles.ops import _contents, _dispatch, _library, _shard, _validate, _where
from msa_tiles.ops._where import Where
from msa_tiles.ops.schedule import Schedule


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    softmax_scale: float | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    schedule: Schedule | None = None,
    workspace: int | Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """``softmax over the visible tokens of the selected blocks of (<q, k> * softmax_scale)``, times v.

    ``q`` [T, Hq, D]; ``k``, ``v`` [Tk, Hkv, D], or [pages, Hkv, page, D] with ``page_table``; one dtype.
    ``block_indices`` int32 [Hkv, T, k]: blocks of the query's own request, distinct, in any order, -1 anywhere; an id
    without a visible token is absent. Returns out [T, Hq, D] in q's dtype, with ``return_lse`` also lse float32 [T, Hq]
    (natural log). A row with nothing visible gives out 0 and lse -inf.

    ``schedule`` is `build_schedule`'s answer for the same ids and lengths. ``workspace`` bounds the memory of partial
    results: bytes, or a uint8 tensor to use (default: 1 GiB). ``out`` and ``lse`` are the caller's buffers.
    """
    total_q, num_q_heads, head_dim = _validate.floating("q", q, "[T, Hq, D]").shape
    if head_dim == 0:
        _validate.refuse("q", "head dim 0", "at least 1")
    keys_dims = "[Tk, Hkv, D]" if page_table is None else "[pages, Hkv, page, D]"
    for name, value in (("k", k), ("v", v)):
        _validate.floating(name, value, keys_dims, q, "q")
        if value.shape[-1] != head_dim:
            _validate.refuse(name, f"head dim {value.shape[-1]}", f"{head_dim} like q")
    if v.shape != k.shape:
        _validate.refuse("v", f"shape {_validate.shape_text(v.shape)}", f"{_validate.shape_text(k.shape)} like k")
    _heads_and_ids(q, k, block_indices, total_q)
    _validate.integer("block_size", block_size, 1)
    for name, factor in (("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale)):
        _validate.scale(name, factor)
    _validate.backend(backend, q.device)
    if page_table is not None:
        _where.page_size("k", k, block_size)
    where = Where(cu_seqlens_q, cu_seqlens_k, page_table, seqused_k, max_seqlen_q, max_seqlen_k, q_positions, k_offset)
    where.validate(total_q, q, "q", k, check)
    if check:
        _shard.check_offsets(where, block_size, backend, q.device)
        _contents.check_block_indices(block_indices, where, block_size, k)
    parts: tuple[Any, ...] = (None, None, None, 0)
    if schedule is not None:
        if not isinstance(schedule, Schedule):
            _validate.refuse_type("schedule", type(schedule).__name__, "a Schedule of build_schedule, or None")
        schedule.validate(block_indices, block_size, where)
        parts = (schedule.edges, schedule.tasks, schedule.counts, schedule.window)
    scratch, scratch_bytes = _workspace(workspace, q)
    scale = _validate.softmax_scale(softmax_scale, head_dim)
    arguments = (q, k, v, block_indices, *where.arguments(), block_size, scale, *parts, scratch_bytes, backend)
    if out is None and lse is None and scratch is None:
        out, lse = _OPERATOR.functional(*arguments)
    else:
        if out is not None:
            shape = [total_q, num_q_heads, head_dim]
            _validate.destination("out", out, shape, "[T, Hq, D]", q.dtype, q, "q")
        if lse is not None:
            _validate.destination("lse", lse, [total_q, num_q_heads], "[T, Hq]", torch.float32, q, "q")
        new_out, new_lse = _allocate_outputs(q, out, lse)
        _OPERATOR.mutating(*arguments, new_out, new_lse, scratch)
        out, lse = new_out, new_lse
    return (out, lse) if return_lse else out


def _heads_and_ids(q: Tensor, k: Tensor, block_indices: Tensor, total_q: int) -> None:
    """The head ratio, and ids for every KV head and query."""
    num_q_heads, num_kv_heads = q.shape[1], k.shape[1]
    if num_kv_heads == 0 or num_q_heads % num_kv_heads != 0:
        _validate.refuse("q", f"{num_q_heads} heads", f"a multiple of the {num_kv_heads} KV heads of k")
    _validate.int32("block_indices", block_indices, [num_kv_heads, total_q, None], "[Hkv, T, k]", q, "q")


def _workspace(value: Any, q: Tensor) -> tuple[Tensor | None, int]:
    """The caller's scratch tensor, if any, and how many bytes partial results may take."""
    if value is None:
        return None, _dispatch.WORKSPACE_BYTES
    if isinstance(value, Tensor):
        _validate.tensor("workspace", value, "[bytes]")
        if value.dtype != torch.uint8:
            _validate.refuse_type("workspace", f"dtype {value.dtype}", "torch.uint8")
        _validate.same_device("workspace", value, q, "q")
        _validate.dense("workspace", value)
        return value, value.numel()
    _validate.integer("workspace", value, 1)
    return None, value


def _allocate_outputs(q: Tensor, out: Tensor | None = None, lse: Tensor | None = None) -> tuple[Tensor, Tensor]:
    if out is None:
        out = q.new_empty(q.shape)
    if lse is None:
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    return out, lse


def _allocate(q: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return _allocate_outputs(q)


def _write(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, *rest: Any) -> None:
    place, rest = rest[:8], rest[8:]
    block_size, scale, edges, tasks, counts, window, workspace_bytes, backend, out, lse, *scratch = rest
    where = Where(*place)
    # Addresses are unknown while a graph is traced, so this is looked at here.
    if scratch and scratch[0] is not None and scratch[0].data_ptr() % _dispatch.ALIGNMENT:
        came = (
            f"an address {scratch[0].data_ptr() % _dispatch.ALIGNMENT} bytes behind a multiple of {_dispatch.ALIGNMENT}"
        )
        _validate.refuse("workspace", came, f"a multiple of {_dispatch.ALIGNMENT}")
    if _dispatch.runs_reference(backend, q.device):
        # A schedule of the kernels is not the reference's: on their device it makes its own.
        made = (edges, tasks, counts) if edges is not None and q.device.type != "cuda" else None
        result, result_lse = reference.sparse_attention(
            q, k, v, block_indices, block_size=block_size, softmax_scale=scale, schedule=made, **where.keywords()
        )
        out.copy_(result)
        lse.copy_(result_lse)
        return
    facts = _dispatch.call_facts(
        "sparse_attention",
        where,
        q.device,
        _dispatch.PRECISIONS[q.dtype],
        {
            "head_dim": q.shape[2],
            "block_size": block_size,
            "group": q.shape[1] // k.shape[1],
            "pages_per_block": _dispatch.pages_per_block(where, k, block_size),
        },
        (q, k, v),
        _dispatch.broken_rules("sparse_attention", topk=block_indices.shape[2])
        + _dispatch.oversized_table(where, block_size),
    )
    if q.numel() == 0 or k.numel() == 0 or block_indices.numel() == 0 or where.num_requests == 0:
        _dispatch.find_kernel(facts, backend)
        out.zero_()
        lse.fill_(-torch.inf)
        return
    stored = k.shape[0] if where.page_table is None else where.page_table.shape[1] * k.shape[2]
    _dispatch.attention_kernels().sparse_attention(
        facts,
        backend,
        q,
        k,
        v,
        block_indices,
        _dispatch.place(where, q.shape[0], k.shape[0], block_size, q.device),
        block_size=block_size,
        softmax_scale=scale,
        longest_k=stored if where.max_seqlen_k is None else min(stored, where.max_seqlen_k),
        schedule=None if edges is None else (edges, tasks, counts, window),
        workspace=scratch[0] if scratch else None,
        workspace_bytes=workspace_bytes,
        out=out,
        lse=lse,
    )


_OPERATOR = _library.define(
    "sparse_attention",
    f"Tensor q, Tensor k, Tensor v, Tensor block_indices, {_where.ARGUMENTS}, SymInt block_size, float softmax_scale, "
    "Tensor? edges, Tensor? tasks, Tensor? counts, SymInt window, SymInt workspace_bytes, str backend",
    ("out", "lse"),
    _allocate,
    _shard.attention(_write),
    scratch="workspace",
)
