"""decode_score: index_score for few queries per request, with the keys split over the GPU."""

from __future__ import annotations

import functools

from torch import Tensor

from msa_tiles.call import indexer
from msa_tiles.call.indexer import ScoreCall
from msa_tiles.call.where import Where
from msa_tiles.launch import decode, index, shards
from msa_tiles.library import registration
from msa_tiles.ops.index_score import by_reference, new_scores
from msa_tiles.quant import QuantizedTensor


def decode_score(
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
    """The answer of `index_score`, made for requests of few queries (1 to 32) over many keys.

    Arguments, result and errors are those of `index_score`; at most 64 index heads. The work is split over the GPU by
    the keys of all requests together, so that one long request fills it as well as many short ones.
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


_OPERATOR = registration.define(
    "decode_score",
    ScoreCall,
    ("out",),
    allocate=new_scores,
    reference=by_reference,
    kernels=shards.scores(functools.partial(index.run_scores, "decode_score", decode.launch_scores)),
)
