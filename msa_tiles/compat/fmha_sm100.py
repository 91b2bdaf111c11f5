"""Functions of MiniMax's ``fmha_sm100`` (github.com/MiniMax-AI/MSA) by name, signature and layout, over ours.

    from msa_tiles.compat.fmha_sm100 import build_k2q_csr, sparse_atten_func, sparse_topk_select

Served besides what they serve: Hopper and the CPU, other groups of heads, any number of selected blocks, decode with
BF16 queries. Undefined there and defined here: equal scores (the lower block), rows that see nothing (out 0, LSE -inf),
paged keys without ``seqused_k`` (``cu_seqlens_k`` tells their lengths). Not served, with a sentence: packed NVFP4 and
FP4 scoring, dense decode, physical pages in place of block ids (2D ``block_table``).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from msa_tiles.compat import flashinfer, k2q, kept, packed

__all__ = [
    "SparseDecodePagedAttentionWrapper",
    "SparseK2qCsrBuilderSm100",
    "build_k2q_csr",
    "fp4_indexer_block_scores",
    "sparse_atten_func",
    "sparse_atten_nvfp4_kv_func",
    "sparse_decode_atten_func",
    "sparse_topk_select",
]


@torch.no_grad()
def sparse_topk_select(
    max_score: Tensor,
    topk: int,
    num_valid_pages: int | Tensor | None = None,
    output: Tensor | None = None,
    force_begin_blocks: int = 0,
    force_end_blocks: int = 0,
    max_score_layout: str = "HKT",
    block_table: Tensor | None = None,
    seq_lens: Tensor | None = None,
    block_size: int = 0,
    decode_query_len: int = 0,
) -> Tensor:
    """The ``topk`` best of each query's first ``num_valid_pages`` blocks: int32 [T, H, topk], ascending, -1 behind.

    ``max_score`` float32 [H, tiles, T] for ``max_score_layout="HKT"``, [T, H, tiles] for ``"THK"``.
    ``num_valid_pages`` is an integer, int32 or int64 [T], or None for all; beyond ``tiles`` it stands for all. The
    ``force_begin_blocks`` first and the ``force_end_blocks`` last valid blocks are always in. ``block_table`` int32
    [T, H, tiles] has what stands in the answer in place of each block's id. ``output`` is the caller's buffer.

    Raises ``NotImplementedError`` for a 2D ``block_table`` and what comes with it (``seq_lens``, ``block_size``,
    ``decode_query_len``), ``ValueError`` for what does not fit.
    """
    layouts = {"HKT": (0, 2, 1), "THK": (1, 0, 2)}
    layout = max_score_layout.upper()
    if layout not in layouts:
        raise ValueError(f"max_score_layout: got {max_score_layout!r}; wanted 'HKT' or 'THK'")
    if max_score.dim() != 3:
        raise ValueError(f"max_score: got shape {list(max_score.shape)}; wanted 3 dimensions, {layout}")
    if seq_lens is not None or block_size or decode_query_len or (block_table is not None and block_table.dim() == 2):
        raise NotImplementedError(
            "block_table: got [requests, pages], with seq_lens, block_size and decode_query_len; wanted [T, H, tiles]: "
            "attention here takes block ids and page_table apart"
        )
    score = max_score.permute(layouts[layout])
    if block_table is None:
        return flashinfer.select(score, topk, num_valid_pages, output, force_begin_blocks, force_end_blocks)
    shape = (score.shape[1], score.shape[0], score.shape[2])
    if tuple(block_table.shape) != shape or block_table.dtype != torch.int32:
        came = f"{block_table.dtype} {list(block_table.shape)}"
        raise ValueError(f"block_table: got {came}; wanted int32 [T, H, tiles] = {list(shape)}")
    ids = flashinfer.select(score, topk, num_valid_pages, output, force_begin_blocks, force_end_blocks)
    entries = block_table.gather(2, ids.clamp(min=0).long()) if shape[2] else ids
    return ids.copy_(torch.where(ids < 0, ids, entries))


@torch.no_grad()
def build_k2q_csr(
    q2k_indices: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    kv_block_size: int,
    *,
    total_k: int | None = None,
    max_seqlen_k: int | None = None,
    max_seqlen_q: int | None = None,
    total_rows: int | None = None,
    qhead_per_kv: int = 1,
    return_schedule: bool = False,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, None]:
    """A selection inverted: for every block the queries that selected it, ``(row_ptr, q_indices)``.

    ``q2k_indices`` int32 [Hkv, T, k], blocks of the query's own request, -1 for none; ``cu_seqlens_q``,
    ``cu_seqlens_k`` int32 [B + 1]; ``kv_block_size`` tokens of a block; ``total_k`` keys of all requests, and at most
    ``max_seqlen_k`` (default: ``total_k``) of one. Rows are the first blocks of all requests,
    then the second ones, and so on; row r of a head has ``q_indices[head, row_ptr[head, r] : row_ptr[head, r + 1]]``,
    numbers of queries in their request, ascending. row_ptr int32 [Hkv, total_rows + 1], q_indices int32 [Hkv, T * k],
    -1 behind the last. Without ``total_rows`` there are rows for as many blocks as there may be, empty ones last.

    With ``return_schedule`` a third part, None: `sparse_atten_func` makes its own. ``max_seqlen_q`` and
    ``qhead_per_kv`` have no effect. Raises ``ValueError`` or ``TypeError`` for what does not fit.
    """
    if total_k is None:
        raise ValueError("total_k: got None; wanted the number of keys of all requests")
    if q2k_indices.dtype != torch.int32 or q2k_indices.dim() != 3:
        came = f"{q2k_indices.dtype} {list(q2k_indices.shape)}"
        raise ValueError(f"q2k_indices: got {came}; wanted int32 [Hkv, T, k]")
    if kv_block_size < 1:
        raise ValueError(f"kv_block_size: got {kv_block_size}; wanted at least 1")
    if cu_seqlens_q.shape != cu_seqlens_k.shape or cu_seqlens_q.dim() != 1:
        shapes = f"{list(cu_seqlens_q.shape)} beside {list(cu_seqlens_k.shape)}"
        raise ValueError(f"cu_seqlens_q: got shape {shapes} of cu_seqlens_k; wanted [B + 1] for both")
    levels = -(-(total_k if max_seqlen_k is None else max_seqlen_k) // kv_block_size)
    if total_rows is None:
        total_rows = total_k // kv_block_size + cu_seqlens_k.shape[0] - 1
    found = k2q.invert(q2k_indices, cu_seqlens_q, cu_seqlens_k, kv_block_size, levels, total_rows)
    return (*found, None) if return_schedule else found


@torch.no_grad()
def sparse_atten_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k2q_row_ptr: Tensor,
    k2q_q_indices: Tensor,
    topK: int,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    blk_kv: int = 128,
    causal: bool = False,
    softmax_scale: float | None = None,
    lse_temperature_scale: float = 1.0,
    return_temperature_lse: bool = False,
    partial_dtype: torch.dtype = torch.bfloat16,
    return_softmax_lse: bool = False,
    page_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    schedule: object = None,
    usable_SM_count: int = -1,
    qk_dtype: torch.dtype | None = None,
    pv_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Attention over the blocks of a selection that `build_k2q_csr` inverted: out [T, Hq, D] in q's dtype.

    ``k2q_row_ptr`` and ``k2q_q_indices`` are its answer for the same lengths. ``q`` [T, Hq, D] bfloat16, float32,
    float64 or e4m3 (out is then bfloat16); ``cu_seqlens_q`` int32 [B + 1]; ``max_seqlen_q`` and ``max_seqlen_k`` bound
    the lengths; ``softmax_scale`` defaults to ``D ** -0.5``; ``k``, ``v`` of q's dtype or e4m3 whose
    elements stand for themselves, flat [Tk, Hkv, D], or paged [pages, Hkv, blk_kv, D] with ``page_table`` int32
    [B, pages]. Lengths are ``seqused_k`` int32 [B] (paged), else those of ``cu_seqlens_k``, which numbers the rows in
    any case. At most ``topK`` blocks of a query count. Not causal by default, as there: a query then sees all of its
    blocks.

    Returns out, with ``return_softmax_lse`` also the LSE float32 [T, Hq] (natural log), and with
    ``return_temperature_lse`` a third one, of scores divided by ``lse_temperature_scale``, for which attention runs
    twice. Accumulation is in float32; ``partial_dtype``, ``schedule``, ``usable_SM_count``, ``qk_dtype`` and
    ``pv_dtype`` are about the original's kernels and have no effect. The selection is turned back by a sort; where it
    is at hand, `msa_tiles.ops.sparse_attention` takes it as it is. Raises ``NotImplementedError`` for packed NVFP4
    (uint8), ``ValueError`` or ``TypeError`` for what does not fit.
    """
    packed.check_tensors(q, k, v)
    if return_temperature_lse and not return_softmax_lse:
        raise ValueError("return_temperature_lse: got True; wanted return_softmax_lse = True beside it")
    if not (math.isfinite(lse_temperature_scale) and lse_temperature_scale > 0):
        raise ValueError(f"lse_temperature_scale: got {lse_temperature_scale}; wanted a finite number above 0")
    total_q = q.shape[0]
    levels = -(-max_seqlen_k // blk_kv)
    ids = k2q.selected(k2q_row_ptr, k2q_q_indices, topK, cu_seqlens_q, cu_seqlens_k, blk_kv, levels, total_q)
    where = packed.places(cu_seqlens_q, cu_seqlens_k, page_table, seqused_k, causal, None, total_q)
    where |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    options: dict[str, Any] = {"few": False, "block_size": blk_kv}
    out, lse = packed.attend(q, k, v, ids, where, softmax_scale, **options)
    if not return_temperature_lse:
        return (out, lse) if return_softmax_lse else out
    if lse_temperature_scale == 1.0:
        return out, lse, lse
    scale = (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale) / lse_temperature_scale
    return out, lse, packed.attend(q, k, v, ids, where, scale, **options)[1]


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

    Raises ``NotImplementedError`` without ``q2k_indices`` and for packed NVFP4, ``ValueError`` or ``TypeError`` for
    what does not fit.
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
    packed.check_tensors(q, k, v)
    if seqlen_q < 1 or q.shape[0] != page_table.shape[0] * seqlen_q:
        raise ValueError(f"q: got {q.shape[0]} rows; wanted seqlen_q = {seqlen_q} for {page_table.shape[0]} requests")
    starts = kept.multiples(seqlen_q, page_table.shape[0] + 1, q.device)
    where = packed.places(starts, None, page_table, seqused_k, causal, None, q.shape[0])
    where |= {"max_seqlen_q": seqlen_q, "max_seqlen_k": max_seqlen_k}
    few = seqlen_q <= packed.FEW_QUERIES
    out, lse = packed.attend(
        q, k, v, q2k_indices, where, softmax_scale, few=few, block_size=blk_kv, out=out, lse=lse
    )  # fmt: skip
    return (out, lse) if return_softmax_lse else out


class SparseK2qCsrBuilderSm100:
    """`build_k2q_csr` as an object; ``blk_kv`` is its ``kv_block_size``."""

    def __call__(
        self, q2k_indices: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *, blk_kv: int = 128, **further: Any
    ) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, None]:
        """The answer of `build_k2q_csr`, whose other arguments ``further`` are."""
        return build_k2q_csr(q2k_indices, cu_seqlens_q, cu_seqlens_k, blk_kv, **further)


def sparse_atten_nvfp4_kv_func(*_: Any, **__: Any) -> Tensor:
    """Raises ``NotImplementedError``: caches in NVFP4 have no operator here."""
    raise NotImplementedError("sparse_atten_nvfp4_kv_func: NVFP4 is not served here; sparse_atten_func takes BF16")


def fp4_indexer_block_scores(*_: Any, **__: Any) -> Tensor:
    """Raises ``NotImplementedError``: index keys and queries in 4 bits have no operator here."""
    raise NotImplementedError(
        "fp4_indexer_block_scores: 4 bits are not served here; msa_tiles.ops.index_score takes BF16 and e4m3"
    )
