"""A layer's step as vLLM's metadata describes it, on the shortest way through our operators.

What separates it from the functions of `operators`: vLLM's metadata builders make prefix_lens from seq_lens, so queries
sit where our own rule puts them; a prefill needs no scores in memory; and a decode step is one operator.

Metadata are whatever has vLLM's attributes: of the indexer, ``prefill`` and ``decode``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from msa_tiles import ops
from msa_tiles.compat import kept, servers
from msa_tiles.compat.vllm import caches
from msa_tiles.compat.vllm.caches import PAGE


class Selecting(NamedTuple):
    """What an indexer selects by."""

    topk: int
    init_blocks: int
    local_blocks: int


class Deferred(NamedTuple):
    """The indexer's part of a decode step, left to attention: queries [T, Hkv, D], keys, and its metadata.

    One operator reads both caches through one table of pages.
    """

    idx_q: Tensor
    index_cache: Tensor
    decode: Any
    by: Selecting


class Attending(NamedTuple):
    """What attention reads besides queries and ids."""

    cache: Tensor
    num_kv_heads: int
    softmax_scale: float
    k_scale: Tensor | None
    v_scale: Tensor | None
    batch_invariant: bool = False

    def operands(self, head_dim: int) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
        """k and v, and the keyword arguments that every operator takes with them."""
        k, v = caches.keys_and_values(self.cache, self.num_kv_heads, head_dim)
        k, v, k_scale, v_scale = caches.scales(k, v, self.k_scale, self.v_scale)
        options = {
            "k_scale": k_scale,
            "v_scale": v_scale,
            "softmax_scale": self.softmax_scale,
            "block_size": PAGE,
            "batch_invariant": self.batch_invariant,
        }
        return (k, v), options


@torch.no_grad()
def select_prefill(
    idx_q: Tensor, index_cache: Tensor, prefill: Any, by: Selecting, out: Tensor | None, backend: str = "auto"
) -> Tensor:
    """The blocks of every query of a prefill: int32 [Hkv, T, topk], into ``out`` of any strides where there is one."""
    return ops.select_blocks(
        idx_q,
        caches.index_keys(index_cache),
        by.topk,
        **_where_prefill(prefill),
        block_size=PAGE,
        init_blocks=by.init_blocks,
        local_blocks=by.local_blocks,
        out=out,
        backend=backend,
    )


@torch.no_grad()
def attend_prefill(q: Tensor, ids: Tensor, prefill: Any, given: Attending, out: Tensor, backend: str = "auto") -> None:
    """Attention of a prefill over its blocks, into ``out`` [T, Hq, D]."""
    (k, v), options = given.operands(q.shape[-1])
    ops.sparse_attention(q, k, v, ids, **_where_prefill(prefill), **options, out=out, backend=backend)


@torch.no_grad()
def attend_decode(q: Tensor, ids: Tensor, metadata: Any, given: Attending, out: Tensor) -> None:
    """Attention of a decode step over blocks that are selected already, into ``out`` [T, Hq, D]."""
    (k, v), options = given.operands(q.shape[-1])
    count = metadata.decode_query_len
    ops.sparse_decode(
        q,
        k,
        v,
        ids,
        cu_seqlens_q=kept.multiples(count, metadata.seq_lens.shape[0] + 1, q.device),
        page_table=metadata.block_table,
        seqused_k=metadata.seq_lens,
        max_seqlen_q=count,
        **options,
        out=out,
    )


@torch.no_grad()
def decode(q: Tensor, ids: Tensor, deferred: Deferred, given: Attending, out: Tensor, backend: str = "auto") -> None:
    """A decode step: into ``ids`` int32 [Hkv, T, topk] the blocks of every query, into ``out`` [T, Hq, D] attention."""
    (k, v), options = given.operands(q.shape[-1])
    idx_q, index_cache, metadata, by = deferred
    # A step is invariant among those of one bound, and vLLM's is that of the batch.
    most = metadata.block_table.shape[1] * PAGE
    bound = most if given.batch_invariant else servers.rounded(metadata.max_seq_len, most)
    count = metadata.decode_query_len
    ops.msa_decode(
        q,
        k,
        v,
        idx_q,
        caches.index_keys(index_cache),
        by.topk,
        cu_seqlens_q=kept.multiples(count, metadata.seq_lens.shape[0] + 1, q.device),
        page_table=metadata.block_table,
        seqused_k=metadata.seq_lens,
        max_seqlen_q=count,
        max_seqlen_k=bound,
        **options,
        init_blocks=by.init_blocks,
        local_blocks=by.local_blocks,
        workspace=servers.workspace(q, idx_q, by.topk, given.num_kv_heads, bound, PAGE, given.batch_invariant),
        out=out,
        lse=torch.empty(q.shape[:2], dtype=torch.float32, device=q.device),
        block_indices=ids,
        backend=backend,
    )


def _where_prefill(prefill: Any) -> dict[str, Any]:
    return {
        "cu_seqlens_q": prefill.cu_seqlens_q,
        "page_table": prefill.block_table,
        "seqused_k": prefill.seq_lens,
        "max_seqlen_q": prefill.max_query_len,
        "max_seqlen_k": min(prefill.max_seq_len, prefill.block_table.shape[1] * PAGE),
    }
