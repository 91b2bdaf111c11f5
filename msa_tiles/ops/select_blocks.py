"""select_blocks: scores and top-k in one, without the score matrix."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from msa_tiles import reference
from msa_tiles.call import indexer, validate
from msa_tiles.call.indexer import SelectCall
from msa_tiles.call.where import Where
from msa_tiles.launch import index, shards
from msa_tiles.launch.index import Selection
from msa_tiles.library import registration, remember
from msa_tiles.quant import QuantizedTensor


def select_blocks(
    idx_q: Tensor | QuantizedTensor,
    idx_k: Tensor | QuantizedTensor,
    topk: int,
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
    num_kv_heads: int | None = None,
    block_size: int = 128,
    init_blocks: int = 0,
    local_blocks: int = 1,
    order: str = "ascending",
    k_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """The answer of ``topk_select(index_score(idx_q, idx_k), topk)``, if both are told lengths: int32 [Hkv, T, topk].

    Without ``cu_seqlens_q`` and ``cu_seqlens_k`` the queries are the last T of Tk tokens. Scores do not say how many
    tokens there are: `topk_select` alone takes T for it.

    ``idx_q`` [T, Hi, Di]; ``idx_k`` [Tk, Di] or [pages, page, Di]; tensors and scales (``q_scale``, ``k_scale``) as in
    `index_score`, ``num_kv_heads``, ``init_blocks``, ``local_blocks`` and ``order`` as in `topk_select`. Extra memory
    is proportional to T * topk. ``out`` is the caller's buffer for the ids.

    Of the scales of quantised queries and keys, kernels read those that can change a ranking: not one scale for all
    keys, and queries' only where a KV head has several index heads, whose scores are compared with each other. For a
    scale of 0, which makes all blocks alike, they then rank as if it were 1. e4m3 queries of keys of 4 bits are widened
    to bfloat16 first, exactly but where several index heads with scales of their own share a KV head: there their
    products with these scales are rounded.
    """
    where = Where(cu_seqlens_q, cu_seqlens_k, page_table, seqused_k, max_seqlen_q, max_seqlen_k, q_positions, k_offset)
    given = indexer.operands_of(idx_q, idx_k, where, q_scale, k_scale)
    known = None
    if out is not None and not check and k_offset is None:
        scalars = (
            topk, max_seqlen_q, max_seqlen_k, num_kv_heads, block_size, init_blocks, local_blocks, order, backend
        )  # fmt: skip
        known = remember.signature((*given.tensors(), out), scalars)
        launch = _SEEN.get(known)
        if launch is not None:
            launch(given, out)
            registration.written((out,))
            return out
    call = indexer.validated_selection(
        given,
        topk,
        check=check,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        order=order,
        backend=backend,
    )
    if out is None:
        return _OPERATOR.functional(call)
    shape = [call.num_kv_heads, given.idx_q.shape[0], topk]
    validate.destination("out", out, shape, "[Hkv, T, topk]", torch.int32, given.idx_q, "idx_q")
    _OPERATOR.mutating(call, out)
    if known is not None:
        _SEEN.keep(known, index.prepare_selection(call, out))
    return out


def _allocate(call: SelectCall) -> tuple[Tensor, ...]:
    idx_q = call.operands.idx_q
    return (indexer.new_ids(idx_q, call.num_kv_heads, idx_q.shape[0], call.topk),)


def _by_reference(call: SelectCall, out: Tensor) -> None:
    given = call.operands
    idx_k, k_scale = indexer.reference_keys(given)
    out.copy_(
        reference.select_blocks(
            given.idx_q,
            idx_k,
            call.topk,
            num_kv_heads=call.num_kv_heads,
            block_size=call.block_size,
            init_blocks=call.init_blocks,
            local_blocks=call.local_blocks,
            order=call.order,
            q_scale=given.q_scale,
            k_scale=k_scale,
            **given.where.keywords(),
        )
    )


_SEEN: remember.Remembered[Selection] = remember.Remembered()
_OPERATOR = registration.define(
    "select_blocks",
    SelectCall,
    ("out",),
    allocate=_allocate,
    reference=_by_reference,
    kernels=shards.selection(functools.partial(index.run_ranking, index.prepare_selection)),
)
