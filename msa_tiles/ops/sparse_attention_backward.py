"""sparse_attention_backward: the gradients of sparse_attention, for callers that run their own autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from msa_tiles import reference
from msa_tiles.call import contents, validate
from msa_tiles.call.attention import attention_tensors
from msa_tiles.call.schedule import Schedule, schedule_parts
from msa_tiles.call.where import ARGUMENTS, Where
from msa_tiles.launch import backward, lookup, places, shards, workspaces
from msa_tiles.library import autograd, registration


def sparse_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    block_indices: Tensor,
    *,
    dlse: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    q_positions: Tensor | None = None,
    k_offset: Tensor | None = None,
    check: bool = False,
    block_size: int = 128,
    softmax_scale: float | None = None,
    schedule: Schedule | None = None,
    workspace: int | None = None,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """dq [T, Hq, D], dk and dv [Tk, Hkv, D] of `sparse_attention` on flat keys, in the dtypes of q, k and v.

    ``dout`` [T, Hq, D], of q's dtype, and ``dlse`` float32 [T, Hq] (None: zero) are the gradients of the results
    ``out`` and ``lse`` of the forward call; every other argument is that call's own. With ``P = exp(S - lse)``,
    ``delta = <out, dout> - dlse`` and ``dS = P * (<dout, v> - delta) * softmax_scale``: ``dq = dS k``, ``dk = dS' q``,
    ``dv = P' dout``, accumulated in float32 (float64 for float64). Rows with nothing visible get 0 and give nothing,
    whatever their gradients hold; so do keys that nobody selected.

    ``workspace`` bounds the memory of partial results in bytes (default: 1 GiB). ``deterministic`` calls repeat bit for
    bit; None follows ``torch.use_deterministic_algorithms``. `sparse_attention` is differentiable by itself.
    """
    where = Where(cu_seqlens_q, cu_seqlens_k, None, seqused_k, max_seqlen_q, max_seqlen_k, q_positions, k_offset)
    attention_tensors(q, k, v, where, block_size)
    total_q, num_q_heads, _ = q.shape
    for name, value in (("dout", dout), ("out", out)):
        validate.floating(name, value, "[T, Hq, D]", q, "q")
        if value.shape != q.shape:
            validate.refuse(name, f"shape {validate.shape_text(value.shape)}", f"{validate.shape_text(q.shape)}")
    validate.float32("lse", lse, [total_q, num_q_heads], "[T, Hq]", q, "q")
    if dlse is not None:
        validate.float32("dlse", dlse, [total_q, num_q_heads], "[T, Hq]", q, "q")
    validate.int32("block_indices", block_indices, [k.shape[1], total_q, None], "[Hkv, T, k]", q, "q")
    validate.backend(backend, q.device)
    where.validate(total_q, q, "q", k)
    if check:
        contents.check_where(where, total_q, k)
        shards.check_offsets(where, block_size, backend, q.device)
        contents.check_block_indices(block_indices, where, block_size, k)
    return _OPERATOR.functional(
        dout,
        q,
        k,
        v,
        out,
        lse,
        block_indices,
        dlse,
        *where.arguments(),
        block_size,
        validate.softmax_scale(softmax_scale, q.shape[2]),
        *schedule_parts(schedule, block_indices, block_size, where, k.shape[0]),
        workspaces.workspace_bytes(workspace),
        autograd.deterministic(deterministic),
        backend,
    )


def _allocate(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Uninitialised dq, dk and dv."""
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _write(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    block_indices: Tensor,
    dlse: Tensor | None,
    *rest: Any,
) -> None:
    """Fill dq, dk and dv, the last of the arguments."""
    place, rest = rest[:8], rest[8:]
    block_size, scale, edges, tasks, counts, window, workspace_bytes, deterministic, backend, *destinations = rest
    where = Where(*place)
    if lookup.runs_reference(backend, q.device):
        made = (edges, tasks, counts) if edges is not None and q.device.type != "cuda" else None
        results = reference.sparse_attention_backward(
            dout,
            q,
            k,
            v,
            out,
            lse,
            block_indices,
            dlse=dlse,
            block_size=block_size,
            softmax_scale=scale,
            schedule=made,
            **where.flat_keywords(),
        )
        for destination, result in zip(destinations, results, strict=True):
            destination.copy_(result)
        return
    facts = lookup.call_facts(
        "sparse_attention_backward",
        where,
        q.device,
        lookup.precision(query=q, key_value=k),
        {"head_dim": q.shape[2], "block_size": block_size, "group": q.shape[1] // k.shape[1]},
        (dout, q, k, v, out),
        lookup.broken_rules("sparse_attention_backward", topk=block_indices.shape[2]),
        queries=q.shape[0],
        heads=q.shape[1],
    )
    longest_k = k.shape[0] if where.max_seqlen_k is None else min(k.shape[0], where.max_seqlen_k)
    # A missing kernel is refused whatever the sizes are.
    lookup.find_kernel(facts, backend)
    if 0 in (q.numel(), k.numel(), block_indices.numel(), where.num_requests, longest_k):
        for destination in destinations:
            destination.zero_()
        return
    backward.sparse_attention_backward(
        facts,
        backend,
        dout,
        q,
        k,
        v,
        out,
        lse,
        block_indices,
        dlse,
        places.place(where, q.shape[0], k.shape[0], block_size, q.device),
        block_size=block_size,
        softmax_scale=scale,
        longest_k=longest_k,
        schedule=None if edges is None else (edges, tasks, counts, window),
        workspace_bytes=workspace_bytes,
        deterministic=deterministic,
        dq=destinations[0],
        dk=destinations[1],
        dv=destinations[2],
    )


def keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keep what the backward of ``msa_tiles::sparse_attention`` needs."""
    q, k, v, block_indices, *rest = inputs
    place, rest = Where(*rest[:8]), rest[8:]
    block_size, scale, edges, tasks, counts, window, workspace_bytes, deterministic, backend = rest
    ctx.save_for_backward(q, k, v, block_indices, *output, edges, tasks, counts, *place.tensors())
    ctx.bounds = place.max_seqlen_q, place.max_seqlen_k
    ctx.numbers = block_size, scale
    ctx.choices = window, workspace_bytes, deterministic, backend


def gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for q, k and v."""
    q, k, v, block_indices, out, lse, edges, tasks, counts, *tensors = ctx.saved_tensors
    starts_q, starts_k, page_table, seqused_k, q_positions, k_offset = tensors
    if page_table is not None:
        validate.refuse("page_table", "paged keys in a call that is differentiated", "flat keys with cu_seqlens_k")
    max_seqlen_q, max_seqlen_k = ctx.bounds
    where = Where(starts_q, starts_k, None, seqused_k, max_seqlen_q, max_seqlen_k, q_positions, k_offset)
    dout = torch.zeros_like(out) if dout is None else autograd.unit_last_stride(dout)
    window, workspace_bytes, deterministic, backend = ctx.choices
    return _OPERATOR.functional(
        dout,
        q,
        k,
        v,
        out,
        lse,
        block_indices,
        dlse,
        *where.arguments(),
        *ctx.numbers,
        edges,
        tasks,
        counts,
        window,
        workspace_bytes,
        deterministic,
        backend,
    )


_SCHEMA = (
    "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor block_indices, Tensor? dlse, "
    f"{ARGUMENTS}, SymInt block_size, float softmax_scale, Tensor? edges, Tensor? tasks, Tensor? counts, "
    "SymInt window, SymInt workspace_bytes, bool deterministic, str backend"
)
_OPERATOR = registration.define(
    "sparse_attention_backward", _SCHEMA, ("dq", "dk", "dv"), _allocate, shards.attention_backward(_write)
)
