"""index_kl: the loss that teaches the indexer where attention goes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from msa_tiles import reference
from msa_tiles.call import contents, validate
from msa_tiles.call.schedule import Schedule, schedule_parts
from msa_tiles.call.where import ARGUMENTS, Where
from msa_tiles.launch import kl, lookup, places, shards, workspaces
from msa_tiles.library import autograd, registration


def index_kl(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    idx_q: Tensor,
    idx_k: Tensor,
    block_indices: Tensor | None,
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
    index_scale: float | None = None,
    token_weights: Tensor | None = None,
    schedule: Schedule | None = None,
    workspace: int | None = None,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> Tensor:
    """KL divergence of the index branch from the main branch: a scalar, float32 (float64 for float64 tensors).

    ``sum over t, h of token_weights[t] * KL(P || Q) / (T * Hkv)`` with, over the visible tokens of the blocks
    ``block_indices`` int32 [Hkv, T, k] (None, for warm-up: of the whole prefix),
    ``P = mean over the group's query heads of softmax(<q, k> * softmax_scale)`` and
    ``Q = softmax(<idx_q, idx_k> * index_scale)``. ``q`` [T, Hq, D], ``k`` [Tk, Hkv, D] and ``lse`` float32 [T, Hq]
    (natural log, over the same tokens: that of `sparse_attention`, or of `dense_attention` for warm-up) are the
    teacher, ``idx_q`` [T, Hkv, Di] and ``idx_k`` [Tk, Di] the student; all but lse have one dtype. The scales default
    to ``D ** -0.5`` and ``Di ** -0.5``. ``token_weights`` float32 [T] (default 1) are constants: a mean over some
    tokens alone has weights of T divided by their number there and 0 elsewhere. A query that sees nothing adds 0.

    Differentiable in idx_q and idx_k, once; no gradient reaches q, k or lse. The gradients are made together with the
    loss where autograd records, and the backward multiplies them by the incoming scalar on the device.

    Keys are flat: ``page_table`` is refused. ``schedule`` is `build_schedule`'s answer for the same ids and lengths,
    ``workspace`` bounds the memory of partial results in bytes (default: 1 GiB). ``deterministic`` calls repeat bit for
    bit; None follows ``torch.use_deterministic_algorithms``. Under ``torch.autocast`` all but lse are cast.
    """
    q, k, idx_q, idx_k = autograd.autocast(q, k, idx_q, idx_k)
    where = Where(cu_seqlens_q, cu_seqlens_k, page_table, seqused_k, max_seqlen_q, max_seqlen_k, q_positions, k_offset)
    if page_table is not None:
        validate.refuse("page_table", "a tensor", "None: the indexer is trained on flat keys")
    _validate_tensors(q, k, lse, idx_q, idx_k, token_weights)
    total_q, num_kv_heads = q.shape[0], k.shape[1]
    validate.integer("block_size", block_size, 1)
    validate.backend(backend, q.device)
    parts: tuple[Any, ...] = (None, None, None, 0)
    if block_indices is not None:
        validate.int32("block_indices", block_indices, [num_kv_heads, total_q, None], "[Hkv, T, k]", q, "q")
        parts = schedule_parts(schedule, block_indices, block_size, where, k.shape[0])
    elif schedule is not None:
        validate.refuse("schedule", "a schedule without block_indices", "None: the whole prefix needs none")
    where.validate(total_q, q, "q", k)
    if check:
        contents.check_where(where, total_q, k)
        shards.check_offsets(where, block_size, backend, q.device)
        if block_indices is not None:
            contents.check_block_indices(block_indices, where, block_size, k)
    loss, _, _ = _OPERATOR.functional(
        q.detach(),
        k.detach(),
        lse.detach(),
        idx_q,
        idx_k,
        block_indices,
        *where.arguments(),
        block_size,
        validate.softmax_scale(softmax_scale, q.shape[2]),
        validate.softmax_scale(index_scale, idx_q.shape[2], "index_scale"),
        None if token_weights is None else token_weights.detach(),
        *parts,
        workspaces.workspace_bytes(workspace),
        autograd.records(idx_q, idx_k),
        autograd.deterministic(deterministic),
        backend,
    )
    return loss


def _validate_tensors(
    q: Tensor, k: Tensor, lse: Tensor, idx_q: Tensor, idx_k: Tensor, token_weights: Tensor | None
) -> None:
    total_q, num_q_heads, head_dim = validate.floating("q", q, "[T, Hq, D]").shape
    total_k, num_kv_heads, key_dim = validate.floating("k", k, "[Tk, Hkv, D]", q, "q").shape
    if head_dim == 0:
        validate.refuse("q", "head dim 0", "at least 1")
    if key_dim != head_dim:
        validate.refuse("k", f"head dim {key_dim}", f"{head_dim} like q")
    if num_kv_heads == 0 or num_q_heads % num_kv_heads != 0:
        validate.refuse("q", f"{num_q_heads} heads", f"a multiple of the {num_kv_heads} KV heads of k")
    validate.float32("lse", lse, [total_q, num_q_heads], "[T, Hq]", q, "q")
    idx_tokens, num_index_heads, index_dim = validate.floating("idx_q", idx_q, "[T, Hi, Di]", q, "q").shape
    if idx_tokens != total_q:
        validate.refuse("idx_q", f"{idx_tokens} tokens", f"{total_q} like q")
    if num_index_heads != num_kv_heads:
        validate.refuse("idx_q", f"{num_index_heads} index heads", f"the {num_kv_heads} KV heads of k, one for each")
    if index_dim == 0:
        validate.refuse("idx_q", "index dim 0", "at least 1")
    validate.floating("idx_k", idx_k, "[Tk, Di]", q, "q")
    if tuple(idx_k.shape) != (total_k, index_dim):
        came, wanted = validate.shape_text(idx_k.shape), validate.shape_text((total_k, index_dim))
        validate.refuse("idx_k", f"shape {came}", f"{wanted}: the tokens of k, the index dim of idx_q")
    if token_weights is not None:
        validate.float32("token_weights", token_weights, [total_q], "[T]", q, "q")
        validate.dense("token_weights", token_weights)


def _allocate(q: Tensor, k: Tensor, lse: Tensor, idx_q: Tensor, idx_k: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    gradients = rest[_GRADIENTS - 5]
    loss = q.new_empty((), dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    if not gradients:
        return loss, idx_q.new_empty(0), idx_k.new_empty(0)
    return loss, idx_q.new_empty(idx_q.shape), idx_k.new_empty(idx_k.shape)


def _write(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    idx_q: Tensor,
    idx_k: Tensor,
    block_indices: Tensor | None,
    *rest: Any,
) -> None:
    where, options = Where(*rest[:8]), rest[8:]
    block_size, scale, index_scale, token_weights, edges, tasks, counts, window, bound, *options_behind = options
    gradients, deterministic, backend, loss, d_idx_q, d_idx_k = options_behind
    if lookup.runs_reference(backend, q.device):
        made = (edges, tasks, counts) if edges is not None and q.device.type != "cuda" else None
        results = reference.index_kl(
            q,
            k,
            lse,
            idx_q,
            idx_k,
            block_indices,
            block_size=block_size,
            softmax_scale=scale,
            index_scale=index_scale,
            token_weights=token_weights,
            schedule=made,
            gradients=gradients,
            **where.flat_keywords(),
        )
        for destination, result in zip((loss, d_idx_q, d_idx_k), results, strict=True):
            if result is not None:
                destination.copy_(result)
        return
    topk = {} if block_indices is None else {"topk": block_indices.shape[2]}
    facts = lookup.call_facts(
        "index_kl",
        where,
        q.device,
        lookup.precision(query=q, key_value=k, index_key=idx_k),
        {
            "head_dim": q.shape[2],
            "index_dim": idx_q.shape[2],
            "block_size": block_size,
            "group": q.shape[1] // k.shape[1],
            "prefix": int(block_indices is None),
        },
        (q, k, idx_q, idx_k),
        lookup.broken_rules("index_kl", **topk),
        queries=q.shape[0],
        heads=q.shape[1],
    )
    # A missing kernel is refused whatever the sizes are.
    lookup.find_kernel(facts, backend)
    nothing_selected = block_indices is not None and block_indices.numel() == 0
    longest_k = k.shape[0] if where.max_seqlen_k is None else min(k.shape[0], where.max_seqlen_k)
    if nothing_selected or 0 in (q.numel(), k.numel(), where.num_requests, longest_k):
        for destination in (loss, d_idx_q, d_idx_k):
            destination.zero_()
        return
    kl.index_kl(
        facts,
        backend,
        q,
        k,
        lse,
        idx_q,
        idx_k,
        block_indices,
        places.place(where, q.shape[0], k.shape[0], block_size, q.device),
        block_size=block_size,
        softmax_scale=scale,
        index_scale=index_scale,
        token_weights=token_weights,
        longest_k=longest_k,
        schedule=None if edges is None else (edges, tasks, counts, window),
        workspace_bytes=bound,
        deterministic=deterministic,
        loss=loss,
        d_idx_q=d_idx_q if gradients else None,
        d_idx_k=d_idx_k if gradients else None,
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, d_idx_q, d_idx_k = output
    ctx.mark_non_differentiable(d_idx_q, d_idx_k)
    ctx.made = inputs[_GRADIENTS]
    ctx.save_for_backward(d_idx_q, d_idx_k)


def _backward(ctx: Any, dloss: Tensor | None, *nothing: Tensor | None) -> tuple[Tensor | None, ...]:
    if not ctx.made:
        raise RuntimeError("msa_tiles::index_kl was called with gradients = False, so there are none to return")
    if dloss is None:
        return ()
    d_idx_q, d_idx_k = ctx.saved_tensors
    return None, None, None, d_idx_q * dloss, d_idx_k * dloss


# Where `gradients` stands among the arguments of the operator.
_GRADIENTS = 23
_OPERATOR = registration.define(
    "index_kl",
    f"Tensor q, Tensor k, Tensor lse, Tensor idx_q, Tensor idx_k, Tensor? block_indices, {ARGUMENTS}, "
    "SymInt block_size, float softmax_scale, float index_scale, Tensor? token_weights, Tensor? edges, Tensor? tasks, "
    "Tensor? counts, SymInt window, SymInt workspace_bytes, bool gradients, bool deterministic, str backend",
    ("loss", "d_idx_q", "d_idx_k"),
    _allocate,
    shards.divergence(_write),
)
autograd.register(_OPERATOR, _setup, _backward)
