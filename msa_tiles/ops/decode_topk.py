"""decode_topk: topk_select for few rows."""

from __future__ import annotations

import functools

from torch import Tensor

from msa_tiles.call.indexer import RankCall
from msa_tiles.call.where import Where
from msa_tiles.launch import index, shards
from msa_tiles.launch.index import Ranking
from msa_tiles.library import registration, remember
from msa_tiles.ops.topk_select import by_reference, new_ranking, rank


def decode_topk(
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
    """The answer of `topk_select`, made for few rows: every row, (query, KV head), takes a CTA of its own.

    Arguments, result and errors are those of `topk_select`. Up to some thousand rows it is the faster one.
    """
    where = Where(cu_seqlens_q, cu_seqlens_k, page_table, seqused_k, max_seqlen_q, max_seqlen_k, q_positions, k_offset)
    return rank(
        _OPERATOR, index.prepare_decode_topk, _SEEN, score, topk, where, check, num_kv_heads, num_valid_blocks,
        block_size, init_blocks, local_blocks, order, layout, out, backend,
    )  # fmt: skip


_SEEN: remember.Remembered[Ranking] = remember.Remembered()
_OPERATOR = registration.define(
    "decode_topk",
    RankCall,
    ("out",),
    allocate=new_ranking,
    reference=by_reference,
    kernels=shards.ranking(functools.partial(index.run_ranking, index.prepare_decode_topk)),
)
