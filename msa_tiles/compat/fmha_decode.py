"""Decode of MiniMax's ``fmha_sm100`` over ours; `msa_tiles.compat.fmha_sm100` has it beside the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from msa_tiles.call import validate
from msa_tiles.compat import arguments, kept, packed


@torch.no_grad()
def sparse_decode_atten_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q2k_indices: Tensor | None = None,
    *,
    page_table: Tensor,
    seqused_k: Tensor,
    seqlen_q: int,
    max_seqlen_k: int,
    blk_kv: int = 128,
    causal: bool = True,
    softmax_scale: float | None = None,
    return_softmax_lse: bool = False,
    schedule: object = None,
    O_partial: Tensor | None = None,
    LSE_partial: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of a decode step over selected blocks: out [B * seqlen_q, Hq, D] in q's dtype (BF16 for e4m3).

    ``q`` [B * seqlen_q, Hq, D] e4m3, bfloat16, float32 or float64; ``k``, ``v`` [pages, Hkv, blk_kv, D] of q's dtype or
    e4m3, whose elements stand for themselves; ``q2k_indices`` int32 [Hkv, B * seqlen_q, k], -1 for none; ``page_table``
    int32 [B, pages]; ``seqused_k`` int32 [B], at most ``max_seqlen_k``. Without ``causal`` a query sees all of its
    blocks; ``softmax_scale`` defaults to ``D ** -0.5``. With ``return_softmax_lse`` also the LSE float32
    [B * seqlen_q, Hq]. ``schedule``, ``O_partial`` and ``LSE_partial`` are about the original's kernels and have no
    effect.

    Raises ``NotImplementedError`` without ``q2k_indices``, ``ValueError`` or ``TypeError`` for what does not fit.
    """
    return _decode(
        q, k, v, q2k_indices, page_table, seqused_k, seqlen_q, max_seqlen_k, blk_kv, causal, softmax_scale,
        return_softmax_lse,
    )  # fmt: skip


class SparseDecodePagedAttentionWrapper:
    """`sparse_decode_atten_func` in two steps: ``plan`` keeps what layers of a decode step share, ``run`` attends."""

    def __init__(self, *, blk_kv: int = 128, causal: bool = True) -> None:
        """``blk_kv`` is the size of blocks and pages in tokens; without ``causal`` a query sees all of its blocks."""
        self.blk_kv, self.causal = blk_kv, causal
        self._planned: tuple[Any, ...] | None = None

    def plan(
        self,
        *,
        page_table: Tensor,
        seqused_k: Tensor,
        seqlen_q: int,
        max_seqlen_k: int,
        q2k_indices: Tensor | None = None,
        num_qo_heads: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = 128,
        enable_cuda_graph: bool = False,
        max_grid_size: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> SparseDecodePagedAttentionWrapper:
        """Keep the tensors, which `run` reads: a captured graph sees what is written into them. Returns itself.

        The other arguments are about the original's kernels and have no effect.
        """
        self._planned = (q2k_indices, page_table, seqused_k, seqlen_q, max_seqlen_k)
        return self

    @torch.no_grad()
    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        softmax_scale: float | None = None,
        return_softmax_lse: bool = False,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The answer of `sparse_decode_atten_func`, into the caller's ``out`` and ``lse`` where they are given.

        Raises ``RuntimeError`` before `plan`, and what `sparse_decode_atten_func` raises.
        """
        if self._planned is None:
            raise RuntimeError("run: called before plan, which says where the keys are")
        ids, page_table, seqused_k, seqlen_q, max_seqlen_k = self._planned
        return _decode(
            q, k, v, ids, page_table, seqused_k, seqlen_q, max_seqlen_k, self.blk_kv, self.causal, softmax_scale,
            return_softmax_lse, out=out, lse=lse,
        )  # fmt: skip


@arguments.told(block_indices="q2k_indices", block_size="blk_kv")
def _decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q2k_indices: Tensor | None,
    page_table: Tensor,
    seqused_k: Tensor,
    seqlen_q: int,
    max_seqlen_k: int,
    blk_kv: int,
    causal: bool,
    softmax_scale: float | None,
    return_softmax_lse: bool,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    if q2k_indices is None:
        raise NotImplementedError("q2k_indices: got None; wanted int32 [Hkv, T, k]: dense decode is not served here")
    packed.check_queries(q)
    validate.tensor("page_table", page_table, "[B, pages]")
    keys, values = packed.keys_and_values(k, v, None, None, None, None)
    if seqlen_q < 1 or q.shape[0] != page_table.shape[0] * seqlen_q:
        raise ValueError(f"q: got {q.shape[0]} rows; wanted seqlen_q = {seqlen_q} for {page_table.shape[0]} requests")
    starts = kept.multiples(seqlen_q, page_table.shape[0] + 1, q.device)
    where = packed.places(starts, None, page_table, seqused_k, causal, None, q.shape[0])
    where |= {"max_seqlen_q": seqlen_q, "max_seqlen_k": max_seqlen_k}
    few = seqlen_q <= packed.FEW_QUERIES
    out, lse = packed.attend(
        q, keys, values, q2k_indices, where, softmax_scale, few=few, block_size=blk_kv, out=out, lse=lse
    )  # fmt: skip
    return (out, lse) if return_softmax_lse else out
