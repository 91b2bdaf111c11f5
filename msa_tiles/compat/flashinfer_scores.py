"""FlashInfer's scores of blocks over ours; `msa_tiles.compat.flashinfer` has them beside the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from msa_tiles import ops
from msa_tiles.call import validate
from msa_tiles.compat import arguments, four_bits, kept, packed
from msa_tiles.quant import QuantizedTensor


@arguments.told(idx_q="q", idx_k="k", q_positions="q_offset")
@torch.no_grad()
def msa_proxy_score(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    page_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    causal: bool = True,
    max_seqlen_q: int | None = None,
    max_k_tiles: int | None = None,
    output: Tensor | None = None,
    reduce_heads: bool = False,
    q_offset: int | Tensor | None = None,
    use_fp32_acc: bool = True,
) -> Tensor:
    """The largest product of a query with a visible key of each block of 128: float32 [Hq, tiles, T], -inf for none.

    ``q`` [T, Hq, 128], ``k`` flat [Tk, Hkv, 128] with ``cu_seqlens_k``, or paged [pages, Hkv, 128, 128] with
    ``page_table`` int32 [B, pages] and ``seqused_k`` int32 [B]; one dtype: bfloat16, float32, float64 or e4m3 (whose
    elements stand for themselves). ``cu_seqlens_q`` int32 [B + 1]. Without ``causal`` a query sees all keys of its
    request; ``q_offset`` (an integer, or int32 [B]) is where a request's first query sits, by default so that the last
    one sits on the last key. Up to a ``max_seqlen_q`` of 32 the decode operator runs. With ``reduce_heads`` the largest
    of all heads, [1, tiles, T]. Without ``output`` the answer is a view of scores in which a query's blocks lie
    together, as `msa_topk_select` reads them; ``output`` gets a copy. Accumulation is in float32 whatever
    ``use_fp32_acc`` says.

    ``max_k_tiles`` (or the width of ``output``) is the number of blocks. Without both it is that of the longest
    request, which is read from the device, and the call waits for it.

    Raises ``ValueError`` or ``TypeError`` for shapes that do not fit, float16, and e4m3 keys below other queries.
    """
    packed.check_queries(q)
    if k.dim() != (3 if page_table is None else 4):
        wanted = "[Tk, Hkv, D]" if page_table is None else f"[pages, Hkv, {packed.BLOCK}, D] beside page_table"
        raise ValueError(f"k: got shape {list(k.shape)}; wanted {wanted}")
    if k.dtype != q.dtype:
        raise TypeError(f"k: got dtype {k.dtype} below queries of {q.dtype}; wanted one dtype of both")
    where = packed.places(cu_seqlens_q, cu_seqlens_k, page_table, seqused_k, True, q_offset, q.shape[0])
    tiles = _tiles(max_k_tiles, output, cu_seqlens_q, cu_seqlens_k, page_table, seqused_k)
    return _answer(scores(q, list(k.unbind(1)), where, tiles, causal, max_seqlen_q), output, reduce_heads)


@arguments.told(idx_q="q_fp4", idx_k="k_fp4", q_positions="q_offset")
@torch.no_grad()
def msa_proxy_score_fp4(
    q_fp4: Tensor,
    k_fp4: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    q_global_scale: float,
    k_global_scale: float,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    page_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    causal: bool = True,
    max_seqlen_q: int | None = None,
    max_k_tiles: int | None = None,
    output: Tensor | None = None,
    reduce_heads: bool = False,
    q_offset: int | Tensor | None = None,
) -> Tensor:
    """`msa_proxy_score` of NVFP4 queries and keys: float32 [Hq, tiles, T], -inf for none.

    ``q_fp4`` uint8 [T, Hq, D / 2], ``k_fp4`` uint8 flat [Tk, Hk, D / 2], or paged [pages, Hk, 128, D / 2], e2m1 in
    pairs. ``q_scale`` and ``k_scale`` are e4m3 scales or their bytes, one for 16 values, of any shape, in contiguous
    tiles of 128 rows by 4 groups ("swizzled" in `msa_tiles.quant.layouts`); rows are those of all leading dimensions,
    the last one fastest. All products are times ``q_global_scale * k_global_scale``, numbers that are finite and not
    below 0. The other arguments, ``tiles`` and the answer are as in `msa_proxy_score`.

    Queries are widened to bfloat16, exactly. Kernels read scales token by token, so those of flat keys, and those of
    the pages that ``page_table`` names, are put in that order on the way: an eighth of the bytes of their keys.
    Nothing else is copied; `msa_tiles.ops.index_score` and `decode_score` take linear scales as they are.

    Raises ``ValueError`` or ``TypeError`` that names the argument for what does not fit.
    """
    for name, number in (("q_global_scale", q_global_scale), ("k_global_scale", k_global_scale)):
        if isinstance(number, Tensor):
            raise TypeError(f"{name}: got a tensor; wanted a number, which the host knows")
        if not (math.isfinite(number) and number >= 0):
            raise ValueError(f"{name}: got {number}; wanted a finite number, not below 0")
    dims = 3 if page_table is None else 4
    for name, stored, count, shape in (
        ("q_fp4", q_fp4, 3, "[T, Hq, D / 2]"),
        ("k_fp4", k_fp4, dims, "[Tk, Hk, D / 2]" if dims == 3 else f"[pages, Hk, {packed.BLOCK}, D / 2]"),
    ):
        if stored.dtype != torch.uint8:
            raise TypeError(f"{name}: got dtype {stored.dtype}; wanted torch.uint8, e2m1 in pairs")
        if stored.dim() != count or (count == 4 and stored.shape[2] != packed.BLOCK):
            raise ValueError(f"{name}: got shape {list(stored.shape)}; wanted {shape}")
    outer = kept.scalar(float(q_global_scale) * float(k_global_scale), q_fp4.device)
    q = four_bits.widened("q_scale", q_fp4, four_bits.by_rows("q_scale", q_fp4, q_scale), "nvfp4")
    if page_table is None:
        scale = four_bits.by_rows("k_scale", k_fp4, k_scale)
    else:
        scale = four_bits.by_rows_of_pages("k_scale", k_fp4, k_scale, page_table)
    keys = [
        four_bits.grouped("k_scale", each, of_head, "nvfp4", outer)
        for each, of_head in zip(k_fp4.unbind(1), scale.unbind(1), strict=True)
    ]
    where = packed.places(cu_seqlens_q, cu_seqlens_k, page_table, seqused_k, True, q_offset, q.shape[0])
    tiles = _tiles(max_k_tiles, output, cu_seqlens_q, cu_seqlens_k, page_table, seqused_k)
    return _answer(scores(q, keys, where, tiles, causal, max_seqlen_q), output, reduce_heads)


def scores(
    q: Tensor,
    keys: Sequence[Tensor | QuantizedTensor],
    where: dict[str, Any],
    tiles: int,
    causal: bool,
    max_seqlen_q: int | None,
) -> Tensor:
    """Scores [Hq, T, tiles] of queries [T, Hq, D] with the keys of each KV head, which as many query heads share."""
    total_q, num_heads, _ = q.shape
    if not keys or num_heads % len(keys):
        raise ValueError(f"q: got {num_heads} heads; wanted a multiple of the {len(keys)} heads of keys")
    score = q.new_empty((num_heads, total_q, tiles), dtype=torch.float32)
    few = max_seqlen_q is not None and max_seqlen_q <= packed.FEW_QUERIES
    if score.numel():
        for part, queries, stored in zip(score.chunk(len(keys)), q.chunk(len(keys), dim=1), keys, strict=True):
            (ops.decode_score if few else ops.index_score)(
                queries, stored, block_size=packed.BLOCK, causal=causal, max_seqlen_q=max_seqlen_q, out=part, **where
            )
    return score


def check_output(output: Tensor, shape: tuple[int, ...], dtype: torch.dtype, name: str = "output") -> None:
    """Refuse a caller's buffer of another shape or dtype."""
    if tuple(output.shape) != shape or output.dtype != dtype:
        raise ValueError(f"{name}: got {output.dtype} {list(output.shape)}; wanted {dtype} {list(shape)}")


def _tiles(
    given: int | None,
    output: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    page_table: Tensor | None,
    seqused_k: Tensor | None,
) -> int:
    """The number of blocks: as given, or of the buffer, or of the longest request."""
    if given is None and output is not None:
        given = validate.tensor("output", output, "[H, tiles, T]").shape[1]
    if given is None:
        lengths = packed.key_lengths(cu_seqlens_k, page_table, seqused_k, packed.num_requests(cu_seqlens_q))
        longest = int(lengths.max()) if lengths.numel() else 0
        given = -(-longest // packed.BLOCK)
    return given


def _answer(score: Tensor, output: Tensor | None, reduce_heads: bool) -> Tensor:
    """Scores [Hq, T, tiles] as callers get them."""
    if reduce_heads:
        score = score.amax(0, keepdim=True)
    found = score.transpose(1, 2)
    if output is None:
        return found
    check_output(output, tuple(found.shape), torch.float32)
    return output.copy_(found)
