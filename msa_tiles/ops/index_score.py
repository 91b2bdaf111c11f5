"""index_score: indexer scores with a block max-pool."""

from __future__ import annotations

import torch
from torch import Tensor

from msa_tiles import reference
from msa_tiles.call import indexer
from msa_tiles.call.indexer import ScoreCall
from msa_tiles.call.where import Where
from msa_tiles.launch import index, shards
from msa_tiles.library import registration
from msa_tiles.quant import QuantizedTensor


def index_score(
    idx_q: Tensor | QuantizedTensor,
    idx_k: Tensor | QuantizedTensor,
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
    causal: bool = True,
    layout: str = "head_major",
    k_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """``score[h, t, b] = max over the tokens j of block b that t may see of <idx_q[t, h], idx_k[j]>``, unscaled.

    ``idx_q`` [T, Hi, Di] and ``idx_k`` [Tk, Di], or [pages, page, Di] with ``page_table``, of one dtype. Returns
    float32 [Hi, T, NB], or [T, Hi, NB] for ``layout="token_major"``; every element is written, -inf where a block has
    no visible token. NB covers ``max_seqlen_k`` positions (default: all that ``idx_k`` or the page table could hold),
    or is the width of ``out``, a buffer in the requested layout. Without ``causal`` a query sees all keys of its
    request.

    Both may be torch.float8_e4m3fn, with float32 scales, or `QuantizedTensor`: scores are then those of the dequantised
    values. ``q_scale`` is [], [Hi] or [T, Hi], ``k_scale`` [] or [Tk] (paged: [pages, page]); None stands for 1. Scales
    are finite and not below 0; others leave scores that they take part in undefined, and ``check=True`` refuses them.
    ``idx_k`` may be a `QuantizedTensor` of format "nvfp4" or "mxfp4", whatever the queries are; products of a group
    that is NaN do not count. e4m3 queries of such keys are widened to bfloat16 first, exactly.
    """
    where = Where(cu_seqlens_q, cu_seqlens_k, page_table, seqused_k, max_seqlen_q, max_seqlen_k, q_positions, k_offset)
    call = indexer.validated_scores(
        indexer.operands_of(idx_q, idx_k, where, q_scale, k_scale),
        check=check,
        block_size=block_size,
        causal=causal,
        layout=layout,
        out=out,
        backend=backend,
    )
    if out is None:
        return _OPERATOR.functional(call)
    _OPERATOR.mutating(call, out)
    return out


def new_scores(call: ScoreCall) -> tuple[Tensor, ...]:
    """An uninitialised float32 result."""
    idx_q = call.operands.idx_q
    total_q, num_heads = idx_q.shape[:2]
    rows = (total_q, num_heads) if call.token_major else (num_heads, total_q)
    return (idx_q.new_empty((*rows, call.num_blocks), dtype=torch.float32),)


def by_reference(call: ScoreCall, out: Tensor) -> None:
    """Fill the scores in plain torch."""
    given = call.operands
    score = out.transpose(0, 1) if call.token_major else out
    idx_k, k_scale = indexer.reference_keys(given)
    score.copy_(
        reference.index_score(
            given.idx_q,
            idx_k,
            block_size=call.block_size,
            causal=call.causal,
            num_blocks=call.num_blocks,
            q_scale=given.q_scale,
            k_scale=k_scale,
            **given.where.keywords(),
        )
    )


_OPERATOR = registration.define(
    "index_score",
    ScoreCall,
    ("out",),
    allocate=new_scores,
    reference=by_reference,
    kernels=shards.scores(index.run_index_scores),
)
