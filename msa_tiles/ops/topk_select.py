"""topk_select: exp-free top-k over block scores."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from msa_tiles import reference
from msa_tiles.call import indexer, validate
from msa_tiles.call.indexer import RankCall, Ranked
from msa_tiles.call.where import Where
from msa_tiles.launch import index, shards
from msa_tiles.launch.index import Ranking
from msa_tiles.library import registration, remember


def topk_select(
    score: Tensor,
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
    num_valid_blocks: int | Tensor | None = None,
    block_size: int = 128,
    init_blocks: int = 0,
    local_blocks: int = 1,
    order: str = "ascending",
    layout: str = "head_major",
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """The ``topk`` best blocks of every query: int32 [Hkv, T, topk], ``min(topk, valid)`` ids and then -1.

    ``score`` [Hi, T, NB], or [T, Hi, NB] for ``layout="token_major"``; kernels take float32. With ``num_kv_heads``
    below Hi the scores of one group are reduced by max. A row's valid blocks follow from its query's position (without
    key lengths a request has as many keys as queries) or are the first ``num_valid_blocks``, an integer or int32 [T].
    The ``init_blocks`` first and ``local_blocks`` last valid blocks are always in, init first where both do not fit,
    and of the local ones the first where these do not.
    Equal scores: the lower id wins; NaN ranks below -inf. ``order`` is ``ascending``, ``score`` (init, local, then
    descending scores) or ``local_last`` (init, descending scores, local). ``out`` is the caller's buffer for the ids.
    """
    where = Where(cu_seqlens_q, cu_seqlens_k, page_table, seqused_k, max_seqlen_q, max_seqlen_k, q_positions, k_offset)
    return rank(
        _OPERATOR, index.prepare_topk_select, _SEEN, score, topk, where, check, num_kv_heads, num_valid_blocks,
        block_size, init_blocks, local_blocks, order, layout, out, backend,
    )  # fmt: skip


def rank(
    operator: registration.Operator[RankCall],
    prepare: Callable[[RankCall, Tensor], Ranking | None],
    seen: remember.Remembered[Ranking],
    score: Tensor,
    topk: int,
    where: Where,
    check: bool,
    num_kv_heads: int | None,
    num_valid_blocks: int | Tensor | None,
    block_size: int,
    init_blocks: int,
    local_blocks: int,
    order: str,
    layout: str,
    out: Tensor | None,
    backend: str,
) -> Tensor:
    """An operator that ranks scores, by what was `seen` of the call or the whole way."""
    counts, number = (num_valid_blocks, None) if isinstance(num_valid_blocks, Tensor) else (None, num_valid_blocks)
    known = None
    if out is not None and not check and where.k_offset is None:
        scalars = (
            topk, where.max_seqlen_q, where.max_seqlen_k, num_kv_heads, number, block_size, init_blocks, local_blocks,
            order, layout, backend,
        )  # fmt: skip
        known = remember.signature((score, *where.tensors(), counts, out), scalars)
        launch = seen.get(known)
        if launch is not None:
            launch(Ranked(score.transpose(0, 1) if layout == "token_major" else score, where, counts), out)
            registration.written((out,))
            return out
    validate.one_of("layout", layout, validate.LAYOUTS)
    validate.floating("score", score, "[T, Hi, NB]" if layout == "token_major" else "[Hi, T, NB]")
    call = indexer.validated_ranking(
        Ranked(score.transpose(0, 1) if layout == "token_major" else score, where, counts),
        topk,
        check=check,
        num_kv_heads=num_kv_heads,
        num_valid=number,
        block_size=block_size,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        order=order,
        backend=backend,
    )
    if out is None:
        return operator.functional(call)
    shape = [call.num_kv_heads, call.operands.score.shape[1], topk]
    validate.destination("out", out, shape, "[Hkv, T, topk]", torch.int32, score, "score")
    operator.mutating(call, out)
    if known is not None:
        seen.keep(known, prepare(call, out))
    return out


def new_ranking(call: RankCall) -> tuple[Tensor, ...]:
    """Uninitialised ids."""
    score = call.operands.score
    return (indexer.new_ids(score, call.num_kv_heads, score.shape[1], call.topk),)


def by_reference(call: RankCall, out: Tensor) -> None:
    """Fill the ids in plain torch."""
    score, where, counts = call.operands
    out.copy_(
        reference.topk_select(
            score,
            call.topk,
            num_kv_heads=call.num_kv_heads,
            num_valid_blocks=call.num_valid if counts is None else counts,
            block_size=call.block_size,
            init_blocks=call.init_blocks,
            local_blocks=call.local_blocks,
            order=call.order,
            **where.keywords(),
        )
    )


_SEEN: remember.Remembered[Ranking] = remember.Remembered()
_OPERATOR = registration.define(
    "topk_select",
    RankCall,
    ("out",),
    allocate=new_ranking,
    reference=by_reference,
    kernels=shards.ranking(functools.partial(index.run_ranking, index.prepare_topk_select)),
)
