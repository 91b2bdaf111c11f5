"""msa_decode: a whole decode step of MiniMax Sparse Attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from msa_tiles import reference
from msa_tiles.call import validate
from msa_tiles.call.attention import attention_tensors, same_rows
from msa_tiles.call.selection import selection
from msa_tiles.call.where import ARGUMENTS, Where
from msa_tiles.launch import decode, lookup, workspaces
from msa_tiles.library import registration, remember
from msa_tiles.ops.index_score import NUM_BLOCKS, score_arguments
from msa_tiles.ops.sparse_attention import allocate_attention, destinations
from msa_tiles.ops.topk_select import allocate_ids


def msa_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    idx_q: Tensor,
    idx_k: Tensor,
    topk: int,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    page_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    q_positions: Tensor | None = None,
    check: bool = False,
    block_size: int = 128,
    init_blocks: int = 0,
    local_blocks: int = 1,
    softmax_scale: float | None = None,
    workspace: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    block_indices: Tensor | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Score the blocks, choose ``topk`` for each query and KV head, attend: for few queries (1 to 32) per request.

    ``q`` [T, Hq, D]; ``k``, ``v`` [Tk, Hkv, D] or [pages, Hkv, page, D]; ``idx_q`` [T, Hi, Di]; ``idx_k`` [Tk, Di] or
    [pages, page, Di]; paged keys share one ``page_table``. Returns out [T, Hq, D], with ``return_lse`` also lse float32
    [T, Hq] (natural log), as `sparse_attention` over the ids of `select_blocks` would.

    ``out``, ``lse`` and ``block_indices`` int32 [Hkv, T, topk] are the caller's buffers, ``workspace`` a uint8 tensor
    of `decode_workspace_bytes`: with all of them, cu_seqlens_q, and cu_seqlens_k or pages, a call allocates nothing.
    The grids depend on shapes and ``max_seqlen_k`` alone, so that a captured graph serves other lengths and tables.
    """
    where = Where(cu_seqlens_q, cu_seqlens_k, page_table, seqused_k, max_seqlen_q, max_seqlen_k, q_positions, None)
    call = None
    if not (check or workspace is None or out is None or lse is None or block_indices is None):
        tensors = (q, k, v, idx_q, idx_k, *where.tensors(), workspace, out, lse, block_indices)
        scalars = (topk, max_seqlen_q, max_seqlen_k, block_size, init_blocks, local_blocks, softmax_scale, backend)
        call = remember.signature(tensors, scalars)
        step = _SEEN.get(call)
        if step is not None:
            step(q, k, v, idx_q, idx_k, where, workspace, out, lse, block_indices)
            registration.written(tensors[-4:])
            return (out, lse) if return_lse else out
    score = score_arguments(idx_q, idx_k, where, check, block_size, True, "head_major", None, None, None, backend)
    attention_tensors(q, k, v, where, block_size)
    validate.floating("idx_q", idx_q, "[T, Hi, Di]", q, "q")
    if idx_q.shape[0] != q.shape[0]:
        validate.refuse("idx_q", f"{idx_q.shape[0]} tokens", f"{q.shape[0]} like q")
    same_rows(idx_k, k, page_table is not None)
    num_kv_heads = k.shape[1]
    selection("idx_q", idx_q.shape[1], topk, num_kv_heads, block_size, init_blocks, local_blocks, "ascending")
    arguments = (
        q,
        k,
        v,
        idx_q,
        idx_k,
        topk,
        *where.arguments(),
        block_size,
        init_blocks,
        local_blocks,
        validate.softmax_scale(softmax_scale, q.shape[2]),
        score[NUM_BLOCKS],
        backend,
    )
    if out is None and lse is None and block_indices is None and workspace is None:
        out, lse, _ = _OPERATOR.functional(*arguments)
        return (out, lse) if return_lse else out
    if workspace is not None:
        validate.scratch("workspace", workspace, q, "q")
    out, lse = destinations(q, out, lse)
    if block_indices is None:
        block_indices = allocate_ids(q, num_kv_heads, q.shape[0], topk)
    else:
        shape = [num_kv_heads, q.shape[0], topk]
        validate.destination("block_indices", block_indices, shape, "[Hkv, T, topk]", torch.int32, q, "q")
    _OPERATOR.mutating(*arguments, out, lse, block_indices, workspace)
    on_kernels = not lookup.runs_reference(backend, q.device) and not _empty(q, k, idx_q, where, score[NUM_BLOCKS])
    if call is not None and on_kernels:
        _SEEN.keep(call, _prepare(*arguments))
    return (out, lse) if return_lse else out


def decode_workspace_bytes(
    q: Tensor,
    topk: int,
    num_kv_heads: int,
    *,
    idx_q: Tensor | None = None,
    max_seqlen_k: int = 0,
    block_size: int = 128,
) -> int:
    """Bytes of the ``workspace`` of a decode call on CUDA tensors of these shapes; 0 where it needs none.

    For `sparse_decode` q [T, Hq, D] is enough; for `msa_decode` also ``idx_q`` [T, Hi, Di] and ``max_seqlen_k``, the
    bound that the call gives (without one: the rows of flat keys, or max_pages times the page size).
    """
    validate.floating("q", q, "[T, Hq, D]")
    validate.integer("topk", topk, 1)
    validate.integer("num_kv_heads", num_kv_heads, 1)
    validate.integer("max_seqlen_k", max_seqlen_k, 0)
    validate.integer("block_size", block_size, 1)
    if q.device.type != "cuda" or q.numel() == 0:
        return 0
    like = q if idx_q is None else validate.floating("idx_q", idx_q, "[T, Hi, Di]", q, "q")
    num_blocks = 0 if idx_q is None else -(-max_seqlen_k // block_size)
    return sum(decode.step_bytes(q, like, topk, num_kv_heads, num_blocks))


def _allocate(
    q: Tensor, k: Tensor, v: Tensor, idx_q: Tensor, idx_k: Tensor, topk: int, *rest: Any
) -> tuple[Tensor, ...]:
    return (*allocate_attention(q), allocate_ids(q, k.shape[1], q.shape[0], topk))


def _write(q: Tensor, k: Tensor, v: Tensor, idx_q: Tensor, idx_k: Tensor, topk: int, *rest: Any) -> None:
    place, rest = rest[:8], rest[8:]
    block_size, init_blocks, local_blocks, scale, num_blocks, backend, out, lse, block_indices, *scratch = rest
    where = Where(*place)
    workspace = scratch[0] if scratch else None
    if workspace is not None:
        workspaces.check_alignment("workspace", workspace)
    if lookup.runs_reference(backend, q.device):
        chosen = reference.select_blocks(
            idx_q,
            idx_k,
            topk,
            num_kv_heads=k.shape[1],
            block_size=block_size,
            init_blocks=init_blocks,
            local_blocks=local_blocks,
            **where.keywords(),
        )
        block_indices.copy_(chosen)
        result, result_lse = reference.sparse_attention(
            q, k, v, chosen, block_size=block_size, softmax_scale=scale, **where.keywords()
        )
        out.copy_(result)
        lse.copy_(result_lse)
        return
    step = _prepare(q, k, v, idx_q, idx_k, topk, *place, *rest[:6])
    if _empty(q, k, idx_q, where, num_blocks):
        out.zero_()
        lse.fill_(-torch.inf)
        block_indices.fill_(-1)
        return
    step(q, k, v, idx_q, idx_k, where, workspace, out, lse, block_indices)


def _empty(q: Tensor, k: Tensor, idx_q: Tensor, where: Where, num_blocks: int) -> bool:
    """Is there nothing to launch kernels for?"""
    return num_blocks == 0 or where.num_requests == 0 or 0 in (q.numel(), k.numel(), idx_q.numel())


def _prepare(q: Tensor, k: Tensor, v: Tensor, idx_q: Tensor, idx_k: Tensor, topk: int, *rest: Any) -> decode.Step:
    """The kernels of a validated call; the arguments of the schema."""
    block_size, init_blocks, local_blocks, scale, num_blocks, backend = rest[8:]
    where = Where(*rest[:8])
    facts = lookup.call_facts(
        "sparse_decode",
        where,
        q.device,
        lookup.precision(query=q, key_value=k),
        {
            "head_dim": q.shape[2],
            "block_size": block_size,
            "group": q.shape[1] // k.shape[1],
            "pages_per_block": lookup.pages_per_block(where, k, block_size),
            "scored_blocks": num_blocks,
        },
        (q, k, v, idx_q, idx_k),
        lookup.broken_rules("decode_topk", topk=topk, max_blocks=num_blocks)
        + lookup.broken_rules("decode_score", num_index_heads=idx_q.shape[1])
        + lookup.oversized_table(where, block_size),
        queries=q.shape[0],
        heads=max(q.shape[1], idx_q.shape[1]),
    )
    return decode.prepare_step(
        facts,
        backend,
        q,
        idx_q,
        topk,
        k.shape[1],
        block_size=block_size,
        num_blocks=num_blocks,
        softmax_scale=scale,
        forced=(init_blocks, local_blocks),
    )


_SEEN: remember.Remembered[decode.Step] = remember.Remembered()
_OPERATOR = registration.define(
    "msa_decode",
    f"Tensor q, Tensor k, Tensor v, Tensor idx_q, Tensor idx_k, SymInt topk, {ARGUMENTS}, SymInt block_size, "
    "SymInt init_blocks, SymInt local_blocks, float softmax_scale, SymInt num_blocks, str backend",
    ("out", "lse", "block_indices"),
    _allocate,
    _write,
    scratch="workspace",
)
