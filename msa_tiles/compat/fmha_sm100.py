"""Functions of MiniMax's ``fmha_sm100`` (github.com/MiniMax-AI/MSA) by name, signature and layout, over ours.

    from msa_tiles.compat.fmha_sm100 import fmha_sm100, fmha_sm100_plan, sparse_topk_select

Served besides what they serve: Hopper and the CPU, other groups of heads, any number of selected blocks, decode with
BF16 queries. Undefined there and defined here: equal scores (the lower block), rows that see nothing (out 0, LSE -inf),
paged keys without ``seqused_k`` (``cu_seqlens_k`` tells their lengths). Not served, with a sentence: flat NVFP4, scales
in the order of SM100's products, dense decode, physical pages in place of block ids (2D ``block_table``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from msa_tiles.call import validate
from msa_tiles.compat import arguments, flashinfer, flashinfer_scores, four_bits, k2q, packed
from msa_tiles.compat.fmha_decode import SparseDecodePagedAttentionWrapper, sparse_decode_atten_func
from msa_tiles.compat.fmha_dense import fmha_sm100, fmha_sm100_plan

__all__ = [
    "SparseDecodePagedAttentionWrapper",
    "SparseK2qCsrBuilderSm100",
    "build_k2q_csr",
    "fmha_sm100",
    "fmha_sm100_plan",
    "fp4_indexer_block_scores",
    "sparse_atten_func",
    "sparse_atten_nvfp4_kv_func",
    "sparse_decode_atten_func",
    "sparse_topk_select",
]


@arguments.told(**flashinfer.SELECTING)
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


@arguments.told()
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
    ``cu_seqlens_k`` int32 [B + 1]; ``kv_block_size`` tokens of a block; ``total_k`` keys of all requests, which must be
    given, as there, though the signature has None (nothing is read to the host), and at most ``max_seqlen_k`` (default:
    ``total_k``) of one. Rows are the first blocks of all requests, then the second ones, and so on; row r of a head has
    ``q_indices[head, row_ptr[head, r] : row_ptr[head, r + 1]]``, numbers of queries in their request, ascending.
    row_ptr int32 [Hkv, total_rows + 1], q_indices int32 [Hkv, T * k], -1 behind the last. Without ``total_rows`` there
    are rows for as many blocks as there may be, empty ones last.

    With ``return_schedule`` a third part, None: `sparse_atten_func` makes its own. ``max_seqlen_q`` and
    ``qhead_per_kv`` have no effect. Raises ``ValueError`` or ``TypeError`` for what does not fit.
    """
    if total_k is None:
        raise ValueError(
            "total_k: got None; wanted the number of keys of all requests, such as k.shape[0] of flat keys: "
            "cu_seqlens_k is not read to the host"
        )
    if q2k_indices.dtype != torch.int32 or q2k_indices.dim() != 3:
        came = f"{q2k_indices.dtype} {list(q2k_indices.shape)}"
        raise ValueError(f"q2k_indices: got {came}; wanted int32 [Hkv, T, k]")
    if kv_block_size < 1:
        raise ValueError(f"kv_block_size: got {kv_block_size}; wanted at least 1")
    packed.num_requests(cu_seqlens_q)
    validate.tensor("cu_seqlens_k", cu_seqlens_k, "[B + 1]")
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        shapes = f"{list(cu_seqlens_q.shape)} beside {list(cu_seqlens_k.shape)}"
        raise ValueError(f"cu_seqlens_q: got shape {shapes} of cu_seqlens_k; wanted [B + 1] for both")
    levels = -(-(total_k if max_seqlen_k is None else max_seqlen_k) // kv_block_size)
    if total_rows is None:
        total_rows = total_k // kv_block_size + cu_seqlens_k.shape[0] - 1
    found = k2q.invert(q2k_indices, cu_seqlens_q, cu_seqlens_k, kv_block_size, levels, total_rows)
    return (*found, None) if return_schedule else found


@arguments.told(topk="topK", block_size="blk_kv", block_indices="k2q_q_indices")
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
    is at hand, `msa_tiles.ops.sparse_attention` takes it as it is. Raises ``ValueError`` or ``TypeError`` for what does
    not fit.
    """
    return _attend(
        q, packed.keys_and_values(k, v, None, None, None, None), (k2q_row_ptr, k2q_q_indices), topK, cu_seqlens_q,
        cu_seqlens_k, max_seqlen_q, max_seqlen_k, blk_kv, causal, softmax_scale, lse_temperature_scale,
        return_temperature_lse, return_softmax_lse, page_table, seqused_k,
    )  # fmt: skip


@arguments.told(topk="topK", block_size="blk_kv", block_indices="k2q_q_indices")
@torch.no_grad()
def sparse_atten_nvfp4_kv_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    k_global_scale: Tensor | None,
    v_global_scale: Tensor | None,
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
) -> Tensor | tuple[Tensor, ...]:
    """`sparse_atten_func` over NVFP4 pages: ``k``, ``v`` uint8 [pages, Hkv, blk_kv, D / 2].

    ``k_scale``, ``v_scale`` e4m3 or its bytes [pages, Hkv, blk_kv, D / 16], contiguous for each page and head, those of
    values with four tokens of a group beside each other; ``k_global_scale``, ``v_global_scale`` float32, one element,
    None for 1. The rest, results and errors are those of `sparse_atten_func`; flat NVFP4 is a ``ValueError``.
    """
    stored = packed.keys_and_values(k, v, k_scale, v_scale, k_global_scale, v_global_scale)
    return _attend(
        q, stored, (k2q_row_ptr, k2q_q_indices), topK, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, blk_kv,
        causal, softmax_scale, lse_temperature_scale, return_temperature_lse, return_softmax_lse, page_table, seqused_k,
    )  # fmt: skip


def _attend(
    q: Tensor,
    stored: tuple[packed.Stored, packed.Stored],
    csr: tuple[Tensor, Tensor],
    topk: int,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    blk_kv: int,
    causal: bool,
    softmax_scale: float | None,
    lse_temperature_scale: float,
    return_temperature_lse: bool,
    return_softmax_lse: bool,
    page_table: Tensor | None,
    seqused_k: Tensor | None,
) -> Tensor | tuple[Tensor, ...]:
    packed.check_queries(q)
    if return_temperature_lse and not return_softmax_lse:
        raise ValueError("return_temperature_lse: got True; wanted return_softmax_lse = True beside it")
    packed.check_temperature(lse_temperature_scale)
    total_q, levels = q.shape[0], -(-max_seqlen_k // blk_kv)
    ids = k2q.selected(*csr, topk, cu_seqlens_q, cu_seqlens_k, blk_kv, levels, total_q)
    where = packed.places(cu_seqlens_q, cu_seqlens_k, page_table, seqused_k, causal, None, total_q)
    where |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    options: dict[str, Any] = {"few": False, "block_size": blk_kv}
    out, lse = packed.attend(q, *stored, ids, where, softmax_scale, **options)
    if not return_temperature_lse:
        return (out, lse) if return_softmax_lse else out
    if lse_temperature_scale == 1.0:
        return out, lse, lse
    scale = (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale) / lse_temperature_scale
    return out, lse, packed.attend(q, *stored, ids, where, scale, **options)[1]


class SparseK2qCsrBuilderSm100:
    """`build_k2q_csr` as an object; ``blk_kv`` is its ``kv_block_size``."""

    @arguments.told(kv_block_size="blk_kv")
    def __call__(
        self, q2k_indices: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *, blk_kv: int = 128, **further: Any
    ) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, None]:
        """The answer of `build_k2q_csr`, whose other arguments ``further`` are."""
        return build_k2q_csr(q2k_indices, cu_seqlens_q, cu_seqlens_k, blk_kv, **further)


@arguments.told(
    idx_q="q_fp4", idx_k="k_fp4", page_table="kv_indices", q_positions="qo_offset", seqused_k="cu_seqlens_k"
)
@torch.no_grad()
def fp4_indexer_block_scores(
    q_fp4: Tensor,
    k_fp4: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    cu_page_offsets: Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    kv_indices: Tensor,
    fp4_format: str,
    causal: bool = False,
    qo_offset: Tensor | None = None,
    scale_layout: str = "preordered_mma",
) -> Tensor:
    """The largest product of a query with a key of each block of 128: float32 [Hq, tiles, T], -inf for none.

    ``q_fp4`` uint8 [T, Hq, D / 2] and ``k_fp4`` uint8 [pages, Hk, 128, D / 2], e2m1 in pairs, with ``q_scale``
    [T, Hq, groups] and ``k_scale`` [pages, Hk, 128, groups], their bytes or of the format's dtype: e4m3 for 16 values
    (``fp4_format`` "nvfp4"), e8m0 for 32 ("mxfp4"). ``cu_seqlens_q``, ``cu_seqlens_k`` and ``cu_page_offsets`` int32
    [B + 1]; request b has the pages ``kv_indices[cu_page_offsets[b] : cu_page_offsets[b + 1]]``, int32. ``tiles`` are
    those of ``max_seqlen_k``. Not causal by default, as there; ``qo_offset`` int32 [B] is where a request's first query
    sits. Queries are widened to bfloat16, exactly. Up to a ``max_seqlen_q`` of 32 the decode operator runs.

    Raises ``NotImplementedError`` for a ``scale_layout`` other than "public", ``ValueError`` or ``TypeError`` for what
    does not fit.
    """
    if scale_layout != "public":
        raise NotImplementedError(
            f"scale_layout: got {scale_layout!r}; wanted 'public': scales in the order of SM100's products are not read"
        )
    if fp4_format not in four_bits.GROUP:
        raise ValueError(f"fp4_format: got {fp4_format!r}; wanted 'nvfp4' or 'mxfp4'")
    if qo_offset is not None and not causal:
        raise ValueError("qo_offset: got a tensor; wanted causal = True beside it")
    validate.tensor("q_fp4", q_fp4, "[T, Hq, D / 2]")
    if k_fp4.dim() != 4 or k_fp4.shape[2] != packed.BLOCK:
        came = f"shape {list(k_fp4.shape)} beside q_fp4 {list(q_fp4.shape)}"
        raise ValueError(f"k_fp4: got {came}; wanted [pages, Hk, {packed.BLOCK}, D / 2] beside [T, Hq, D / 2]")
    requests = packed.num_requests(cu_seqlens_q)
    validate.shaped("cu_seqlens_k", cu_seqlens_k, [requests + 1], "[B + 1]")
    validate.shaped("cu_page_offsets", cu_page_offsets, [requests + 1], "[B + 1]")
    validate.tensor("k_scale", k_scale, f"[pages, Hk, {packed.BLOCK}, groups]")
    q = four_bits.widened("q_scale", q_fp4.view(torch.uint8), q_scale, fp4_format)
    keys = k_fp4.view(torch.uint8)
    tiles = -(-max_seqlen_k // packed.BLOCK)
    table = packed.table_of(kv_indices, cu_page_offsets, tiles)
    return flashinfer_scores.scores(
        q,
        [four_bits.grouped("k_scale", keys[:, head], k_scale[:, head], fp4_format) for head in range(keys.shape[1])],
        packed.places(cu_seqlens_q, None, table, cu_seqlens_k.diff(), True, qo_offset, q.shape[0]),
        tiles,
        causal,
        max_seqlen_q,
    ).transpose(1, 2)
