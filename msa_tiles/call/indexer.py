"""Calls of the indexer: scores, rankings, and both in one."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from msa_tiles.call import backends, contents, formats, scales, validate
from msa_tiles.call.where import Where, page_size
from msa_tiles.quant import FP8

# The numbers by which kernels know the orders.
ORDERS = {"ascending": 0, "score": 1, "local_last": 2}


class Index(NamedTuple):
    """What the indexer reads: idx_q [T, Hi, Di]; idx_k [Tk, Di] or [pages, page, Di]; scales of quantised ones."""

    idx_q: Tensor
    idx_k: Tensor
    where: Where
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    k_global_scale: Tensor | None = None

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.idx_q, self.idx_k, *self.where.tensors(), self.q_scale, self.k_scale, self.k_global_scale


class Ranked(NamedTuple):
    """What top-k reads: score [Hi, T, NB], and the valid blocks of each query, int32 [T], where those are given."""

    score: Tensor
    where: Where
    num_valid_blocks: Tensor | None = None

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.score, *self.where.tensors(), self.num_valid_blocks


class ScoreCall(NamedTuple):
    """A validated call that scores blocks."""

    operands: Index
    block_size: int
    causal: bool
    token_major: bool
    num_blocks: int
    backend: str

    @property
    def device(self) -> torch.device:
        return self.operands.idx_q.device


class RankCall(NamedTuple):
    """A validated call that ranks scores. One number of valid blocks for all queries stands here."""

    operands: Ranked
    topk: int
    num_kv_heads: int
    num_valid: int | None
    block_size: int
    init_blocks: int
    local_blocks: int
    order: str
    backend: str

    @property
    def device(self) -> torch.device:
        return self.operands.score.device


class SelectCall(NamedTuple):
    """A validated call that scores blocks and ranks them."""

    operands: Index
    topk: int
    num_kv_heads: int
    block_size: int
    init_blocks: int
    local_blocks: int
    order: str
    backend: str

    @property
    def device(self) -> torch.device:
        return self.operands.idx_q.device


def operands_of(idx_q: Any, idx_k: Any, where: Where, q_scale: Any, k_scale: Any) -> Index:
    """The operands of a call that is not checked yet, quantised tensors taken apart."""
    idx_q, q_scale = scales.unpacked("idx_q", idx_q, q_scale, "q_scale")
    idx_k, k_scale, k_global = scales.unpacked_keys("idx_k", idx_k, k_scale, "k_scale")
    return Index(idx_q, idx_k, where, q_scale, k_scale, k_global)


def check_operands(
    operands: Index,
    block_size: int,
    backend: str,
    check: bool,
    q_scale_name: str = "q_scale",
    k_scale_name: str = "k_scale",
) -> None:
    """Check queries and keys of one dtype, or keys of 4 bits, their scales, places and pages, and the backend."""
    idx_q, idx_k, where, q_scale, k_scale, k_global = operands
    paged = where.page_table is not None
    validate.floating("idx_q", idx_q, "[T, Hi, Di]", further=(FP8,))
    dims = validate.keys_dims("idx_k", idx_k, "[Tk, Di]", "[pages, page, Di]", paged)
    if formats.is_packed(idx_k):
        validate.floating("idx_k", idx_k, dims, further=(formats.BYTES,))
        validate.same_device("idx_k", idx_k, idx_q, "idx_q")
    else:
        if isinstance(idx_k, Tensor) and idx_k.dtype == FP8 and idx_q.dtype != FP8:
            wanted = f"{idx_q.dtype} like idx_q, or idx_q quantised as well (msa_tiles.quant.quantize_fp8)"
            validate.refuse_type("idx_k", f"dtype {FP8}", wanted)
        validate.floating("idx_k", idx_k, dims, idx_q, "idx_q", further=(FP8,))
    if idx_q.shape[1] == 0:
        validate.refuse("idx_q", "0 index heads", "at least 1")
    if idx_q.shape[2] == 0:
        validate.refuse("idx_q", "index dim 0", "at least 1")
    if formats.width(idx_k) != idx_q.shape[2]:
        validate.refuse("idx_k", f"index dim {formats.width(idx_k)}", f"{idx_q.shape[2]} like idx_q")
    scales.of_queries(q_scale_name, q_scale, idx_q, "idx_q", "Hi")
    scales.of_index_keys(k_scale_name, k_scale, idx_k, "idx_k", paged)
    validate.integer("block_size", block_size, 1, validate.LARGEST_BLOCK)
    backends.check(backend, idx_q.device)
    if paged:
        page_size("idx_k", idx_k, block_size)
    where.validate(idx_q.shape[0], idx_q, "idx_q", idx_k)
    if validate.boolean("check", check):
        contents.check_where(where, idx_q.shape[0], idx_k)
        contents.check_offsets(where, block_size, backend, idx_q.device)
        of_keys = {k_scale_name: k_scale, "idx_k.global_scale": k_global}
        contents.check_scales(where, idx_q, idx_k, {q_scale_name: q_scale}, of_keys)


def validated_scores(
    operands: Index,
    *,
    check: bool,
    block_size: int,
    causal: bool,
    layout: str,
    out: Tensor | None,
    backend: str,
) -> ScoreCall:
    """Check a call that scores blocks, into ``out`` or into a new tensor."""
    block_size, operands = validate.plain(block_size), operands._replace(where=operands.where.plain())
    validate.boolean("causal", causal)
    validate.one_of("layout", layout, validate.LAYOUTS)
    check_operands(operands, block_size, backend, check)
    token_major = layout == "token_major"
    num_blocks = score_width(operands, block_size, token_major, out)
    if check:
        idx_q, idx_k, where, *_ = operands
        contents.check_score_width(num_blocks, where, idx_q.shape[0], block_size, idx_q, idx_k)
    return ScoreCall(operands, block_size, causal, token_major, num_blocks, backend)


def reference_keys(operands: Index) -> tuple[Tensor, Tensor | None]:
    """Keys and their scale as the reference takes them: what is in groups comes dequantised, in float32."""
    if not formats.is_packed(operands.idx_k):
        return operands.idx_k, operands.k_scale
    return scales.of_values(operands.idx_k, operands.k_scale, operands.k_global_scale), None


def score_width(operands: Index, block_size: int, token_major: bool, out: Tensor | None) -> int:
    """Columns of the scores, from host facts alone."""
    idx_q, idx_k, where, *_ = operands
    bound = where.max_seqlen_k
    # A batch's longest request may be shorter than its packed keys: then the caller's buffer is the bound.
    known = bound is not None or (
        where.cu_seqlens_k is None and where.seqused_k is None and where.k_offset is None and where.num_requests == 1
    )
    if bound is None:
        if where.k_offset is not None and out is None:
            validate.refuse("max_seqlen_k", "None with k_offset", "a bound of k_offset plus the keys of a request")
        bound = idx_k.shape[0] if where.page_table is None else where.page_table.shape[1] * idx_k.shape[-2]
    needed = -(-bound // block_size)
    if out is None:
        return needed
    total_q, num_heads = idx_q.shape[0], idx_q.shape[1]
    shape, dims = ([num_heads, total_q, None], "[Hi, T, NB]")
    if token_major:
        shape, dims = ([total_q, num_heads, None], "[T, Hi, NB]")
    validate.destination("out", out, shape, dims, torch.float32, idx_q, "idx_q")
    if known and out.shape[2] < needed:
        validate.refuse("out", f"{out.shape[2]} columns", f"at least {needed}, the blocks of {bound} keys")
    return out.shape[2]


def validated_ranking(
    operands: Ranked,
    topk: int,
    *,
    check: bool,
    num_kv_heads: int | None,
    num_valid: int | None,
    block_size: int,
    init_blocks: int,
    local_blocks: int,
    order: str,
    backend: str,
) -> RankCall:
    """Check a call that ranks scores [Hi, T, NB]."""
    operands = operands._replace(where=operands.where.plain())
    topk, block_size, init_blocks, local_blocks = map(validate.plain, (topk, block_size, init_blocks, local_blocks))
    num_kv_heads, num_valid = validate.plain(num_kv_heads), validate.plain(num_valid)
    score, where, counts = operands
    num_heads, total_q, width = score.shape
    num_kv_heads = kv_heads("score", num_heads, topk, num_kv_heads, block_size, init_blocks, local_blocks, order)
    backends.check(backend, score.device)
    where.validate(total_q, score, "score", None)
    if validate.boolean("check", check):
        contents.check_where(where, total_q, None)
    if counts is not None:
        validate.int32("num_valid_blocks", counts, [total_q], "[T]", score, "score")
        validate.dense("num_valid_blocks", counts)
        if check:
            contents.check_valid_blocks("num_valid_blocks", counts, width)
    elif num_valid is not None:
        validate.integer("num_valid_blocks", num_valid, 0)
        if num_valid > width:
            validate.refuse("num_valid_blocks", str(num_valid), f"at most the {width} columns of score")
    elif check:
        contents.check_score_width(width, where, total_q, block_size, score, None)
    return RankCall(
        operands, topk, num_kv_heads, num_valid, block_size, init_blocks, local_blocks, order, backend
    )  # fmt: skip


def validated_selection(
    operands: Index,
    topk: int,
    *,
    check: bool,
    num_kv_heads: int | None,
    block_size: int,
    init_blocks: int,
    local_blocks: int,
    order: str,
    backend: str,
) -> SelectCall:
    """Check a call that scores blocks and ranks them."""
    operands = operands._replace(where=operands.where.plain())
    topk, block_size, init_blocks, local_blocks = map(validate.plain, (topk, block_size, init_blocks, local_blocks))
    num_kv_heads = validate.plain(num_kv_heads)
    check_operands(operands, block_size, backend, check)
    num_heads = operands.idx_q.shape[1]
    num_kv_heads = kv_heads("idx_q", num_heads, topk, num_kv_heads, block_size, init_blocks, local_blocks, order)
    return SelectCall(operands, topk, num_kv_heads, block_size, init_blocks, local_blocks, order, backend)


def kv_heads(
    name: str,
    num_heads: int,
    topk: int,
    num_kv_heads: int | None,
    block_size: int,
    init_blocks: int,
    local_blocks: int,
    order: str,
) -> int:
    """Check the parameters of a selection over the ``num_heads`` index heads of ``name``; the number of KV heads."""
    validate.integer("topk", topk, 1, validate.LARGEST_TOPK)
    validate.integer("block_size", block_size, 1, validate.LARGEST_BLOCK)
    validate.integer("init_blocks", init_blocks, 0)
    validate.integer("local_blocks", local_blocks, 0)
    validate.one_of("order", order, tuple(ORDERS))
    if num_heads == 0:
        validate.refuse(name, "0 index heads", "at least 1")
    if num_kv_heads is None:
        return num_heads
    validate.integer("num_kv_heads", num_kv_heads, 1)
    if num_heads % num_kv_heads != 0:
        validate.refuse("num_kv_heads", str(num_kv_heads), f"a divisor of the {num_heads} index heads of {name}")
    return num_kv_heads


def new_ids(like: Tensor, num_kv_heads: int, total_q: int, topk: int) -> Tensor:
    """An uninitialised int32 [Hkv, T, topk]."""
    return like.new_empty((num_kv_heads, total_q, topk), dtype=torch.int32)
