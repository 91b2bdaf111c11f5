"""index_kl: the loss that teaches the indexer where attention goes."""

from __future__ import annotations

import torch
from torch import Tensor

from msa_tiles import reference
from msa_tiles.call import backends, contents, validate
from msa_tiles.call.kl import Divergence, check_tensors
from msa_tiles.call.schedule import Schedule, of_call
from msa_tiles.call.where import Where
from msa_tiles.call.workspace import workspace_bytes
from msa_tiles.launch import kl, shards
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
    check_tensors(q, k, lse, idx_q, idx_k, token_weights)
    total_q, num_kv_heads = q.shape[0], k.shape[1]
    block_size, where = validate.plain(block_size), where.plain()
    validate.integer("block_size", block_size, 1, validate.LARGEST_BLOCK)
    backends.check(backend, q.device)
    made = None
    if block_indices is not None:
        validate.int32("block_indices", block_indices, [num_kv_heads, total_q, None], "[Hkv, T, k]", q, "q")
        made = of_call(schedule, block_indices, block_size, where, k.shape[0])
    elif schedule is not None:
        validate.refuse("schedule", "a schedule without block_indices", "None: the whole prefix needs none")
    where.validate(total_q, q, "q", k)
    if validate.boolean("check", check):
        contents.check_where(where, total_q, k)
        contents.check_offsets(where, block_size, backend, q.device)
        if block_indices is not None:
            contents.check_block_indices(block_indices, where, block_size, k)
            contents.check_schedule(made, block_indices, where, block_size, k)
    call = Divergence(
        q.detach(),
        k.detach(),
        lse.detach(),
        idx_q,
        idx_k,
        block_indices,
        where,
        None if token_weights is None else token_weights.detach(),
        made,
        block_size,
        validate.softmax_scale(softmax_scale, q.shape[2]),
        validate.softmax_scale(index_scale, idx_q.shape[2], "index_scale"),
        workspace_bytes(workspace),
        autograd.records(idx_q, idx_k),
        autograd.deterministic(deterministic),
        backend,
    )
    loss, _, _ = _OPERATOR.functional(call)
    return loss


def _allocate(call: Divergence) -> tuple[Tensor, ...]:
    q, idx_q, idx_k = call.q, call.idx_q, call.idx_k
    loss = q.new_empty((), dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    if not call.gradients:
        return loss, idx_q.new_empty(0), idx_k.new_empty(0)
    return loss, idx_q.new_empty(idx_q.shape), idx_k.new_empty(idx_k.shape)


def _by_reference(call: Divergence, loss: Tensor, d_idx_q: Tensor, d_idx_k: Tensor) -> None:
    made = None if call.schedule is None or call.device.type == "cuda" else call.schedule[:3]
    results = reference.index_kl(
        call.q,
        call.k,
        call.lse,
        call.idx_q,
        call.idx_k,
        call.block_indices,
        block_size=call.block_size,
        softmax_scale=call.softmax_scale,
        index_scale=call.index_scale,
        token_weights=call.token_weights,
        schedule=made,
        gradients=call.gradients,
        **call.where.flat_keywords(),
    )
    for destination, result in zip((loss, d_idx_q, d_idx_k), results, strict=True):
        if result is not None:
            destination.copy_(result)


def _backward(
    call: Divergence, outputs: tuple[Tensor, ...], dloss: Tensor | None, *nothing: Tensor | None
) -> tuple[Tensor | None, ...]:
    if not call.gradients:
        raise RuntimeError("msa_tiles::index_kl was called with gradients = False, so there are none to return")
    if dloss is None:
        return ()
    _, d_idx_q, d_idx_k = outputs
    return None, None, None, d_idx_q * dloss, d_idx_k * dloss


_OPERATOR = registration.define(
    "index_kl",
    Divergence,
    ("loss", "d_idx_q", "d_idx_k"),
    allocate=_allocate,
    reference=_by_reference,
    kernels=shards.divergence(kl.run),
)
autograd.register(_OPERATOR, _backward, constants=(1, 2), keeps_inputs=False)
