"""The gradients of sparse_attention: the registered operator, and how autograd reaches it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from msa_tiles import reference
from msa_tiles.ops import _dispatch, _library, _shard, _training, _validate, _where
from msa_tiles.ops._where import Where


def allocate(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Uninitialised dq, dk and dv."""
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def write(
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
    block_size, scale, edges, tasks, counts, window, workspace_bytes, deterministic, backend, *gradients = rest
    where = Where(*place)
    if _dispatch.runs_reference(backend, q.device):
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
        for destination, result in zip(gradients, results, strict=True):
            destination.copy_(result)
        return
    facts = _dispatch.call_facts(
        "sparse_attention_backward",
        where,
        q.device,
        _dispatch.PRECISIONS[q.dtype],
        {"head_dim": q.shape[2], "block_size": block_size, "group": q.shape[1] // k.shape[1]},
        (dout, q, k, v, out),
        _dispatch.broken_rules("sparse_attention_backward", topk=block_indices.shape[2]),
        queries=q.shape[0],
    )
    longest_k = k.shape[0] if where.max_seqlen_k is None else min(k.shape[0], where.max_seqlen_k)
    if 0 in (q.numel(), k.numel(), block_indices.numel(), where.num_requests, longest_k):
        _dispatch.find_kernel(facts, backend)
        for destination in gradients:
            destination.zero_()
        return
    # A missing kernel is refused here, before anything is imported that launches one.
    _dispatch.find_kernel(facts, backend)
    _dispatch.training_kernels().sparse_attention_backward(
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
        _dispatch.place(where, q.shape[0], k.shape[0], block_size, q.device),
        block_size=block_size,
        softmax_scale=scale,
        longest_k=longest_k,
        schedule=None if edges is None else (edges, tasks, counts, window),
        workspace_bytes=workspace_bytes,
        deterministic=deterministic,
        dq=gradients[0],
        dk=gradients[1],
        dv=gradients[2],
    )


SCHEMA = (
    "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor block_indices, Tensor? dlse, "
    f"{_where.ARGUMENTS}, SymInt block_size, float softmax_scale, Tensor? edges, Tensor? tasks, Tensor? counts, "
    "SymInt window, SymInt workspace_bytes, bool deterministic, str backend"
)
OPERATOR = _library.define(
    "sparse_attention_backward", SCHEMA, ("dq", "dk", "dv"), allocate, _shard.attention_backward(write)
)


def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keep what the backward of ``msa_tiles::sparse_attention`` needs."""
    q, k, v, block_indices, *rest = inputs
    place, rest = Where(*rest[:8]), rest[8:]
    block_size, scale, edges, tasks, counts, window, workspace_bytes, deterministic, backend = rest
    ctx.save_for_backward(q, k, v, block_indices, *output, edges, tasks, counts, *place.tensors())
    ctx.bounds = place.max_seqlen_q, place.max_seqlen_k
    ctx.numbers = block_size, scale
    ctx.choices = window, workspace_bytes, deterministic, backend


def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for q, k and v."""
    q, k, v, block_indices, out, lse, edges, tasks, counts, *tensors = ctx.saved_tensors
    starts_q, starts_k, page_table, seqused_k, q_positions, k_offset = tensors
    if page_table is not None:
        _validate.refuse("page_table", "paged keys in a call that is differentiated", "flat keys with cu_seqlens_k")
    max_seqlen_q, max_seqlen_k = ctx.bounds
    where = Where(starts_q, starts_k, None, seqused_k, max_seqlen_q, max_seqlen_k, q_positions, k_offset)
    dout = torch.zeros_like(out) if dout is None else _training.unit_last_stride(dout)
    window, workspace_bytes, deterministic, backend = ctx.choices
    return OPERATOR.functional(
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
