"""index_score: indexer scores with a block max-pool."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from msa_tiles import reference
from msa_tiles.call import contents, validate
from msa_tiles.call.scales import Indexer, applied_scales, has_key_scales, indexer
from msa_tiles.call.where import ARGUMENTS, Where, page_size
from msa_tiles.launch import lookup, places, shards
from msa_tiles.library import registration
from msa_tiles.quant import FP8, QuantizedTensor

# Places in the arguments of `SCHEMA`, counted from the end.
TOKEN_MAJOR, NUM_BLOCKS = -5, -4

Launch = Callable[[Any, Indexer, Where, int, bool, Tensor], None]


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
    must be positive numbers; others leave the scores that they take part in undefined, and ``check=True`` refuses them.
    """
    where = Where(cu_seqlens_q, cu_seqlens_k, page_table, seqused_k, max_seqlen_q, max_seqlen_k, q_positions, k_offset)
    arguments = score_arguments(idx_q, idx_k, where, check, block_size, causal, layout, k_scale, q_scale, out, backend)
    if out is None:
        return _OPERATOR.functional(*arguments)
    _OPERATOR.mutating(*arguments, out)
    return out


def score_arguments(
    idx_q: Tensor | QuantizedTensor,
    idx_k: Tensor | QuantizedTensor,
    where: Where,
    check: bool,
    block_size: int,
    causal: bool,
    layout: str,
    k_scale: Tensor | None,
    q_scale: Tensor | None,
    out: Tensor | None,
    backend: str,
) -> tuple[Any, ...]:
    """Validate a call that scores blocks; the arguments of `SCHEMA`."""
    call = indexer(idx_q, q_scale, idx_k, k_scale, where.page_table is not None)
    idx_q, idx_k, q_scale, k_scale = call
    validate.integer("block_size", block_size, 1)
    validate.boolean("causal", causal)
    validate.one_of("layout", layout, validate.LAYOUTS)
    validate.backend(backend, idx_q.device)
    if where.page_table is not None:
        page_size("idx_k", idx_k, block_size)
    where.validate(idx_q.shape[0], idx_q, "idx_q", idx_k)
    if check:
        contents.check_where(where, idx_q.shape[0], idx_k)
    token_major = layout == "token_major"
    num_blocks = _width(idx_q, idx_k, where, block_size, token_major, out)
    if check:
        shards.check_offsets(where, block_size, backend, idx_q.device)
        contents.check_score_width(num_blocks, where, idx_q.shape[0], block_size, idx_q, idx_k)
        contents.check_scales(where, idx_q, q_scale, idx_k, k_scale)
    return (idx_q, idx_k, *where.arguments(), block_size, causal, token_major, num_blocks, q_scale, k_scale, backend)


def _width(idx_q: Tensor, idx_k: Tensor, where: Where, block_size: int, token_major: bool, out: Tensor | None) -> int:
    """Columns of the result, from host facts alone."""
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


def allocate_scores(idx_q: Tensor, idx_k: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    token_major, num_blocks = rest[TOKEN_MAJOR], rest[NUM_BLOCKS]
    total_q, num_heads = idx_q.shape[0], idx_q.shape[1]
    shape = (total_q, num_heads, num_blocks) if token_major else (num_heads, total_q, num_blocks)
    return (idx_q.new_empty(shape, dtype=torch.float32),)


def write_scores(op: str, launch: Launch, idx_q: Tensor, idx_k: Tensor, *rest: Any) -> None:
    """Fill the last argument: by the reference, or by ``launch(kernel, call, where, block_size, causal, out)``.

    The launch gets calls with keys, requests and an output that is not empty.
    """
    *place, block_size, causal, token_major, num_blocks, q_scale, k_scale, backend, out = rest
    where = Where(*place)
    score = out.transpose(0, 1) if token_major else out
    if lookup.runs_reference(backend, idx_q.device):
        score.copy_(
            reference.index_score(
                idx_q,
                idx_k,
                block_size=block_size,
                causal=causal,
                num_blocks=num_blocks,
                q_scale=q_scale,
                k_scale=k_scale,
                **where.keywords(),
            )
        )
        return
    variant = {
        "head_dim": idx_q.shape[2],
        "block_size": block_size,
        "pages_per_block": lookup.pages_per_block(where, idx_k, block_size),
    }
    if idx_q.dtype == FP8:
        variant["key_scales"] = int(has_key_scales(k_scale))
    facts = lookup.call_facts(
        op,
        where,
        idx_q.device,
        lookup.precision(query=idx_q, index_key=idx_k),
        variant,
        (idx_q, idx_k),
        lookup.broken_rules(op, num_index_heads=idx_q.shape[1]) + lookup.oversized_table(where, block_size),
        queries=idx_q.shape[0],
        heads=idx_q.shape[1],
    )
    kernel = lookup.find_kernel(facts, backend)
    if score.numel() == 0:
        return
    if idx_k.numel() == 0 or where.num_requests == 0:
        score.fill_(-torch.inf)
        return
    launch(kernel, Indexer(idx_q, idx_k, q_scale, k_scale), where, block_size, causal, score)


def _launch(kernel: Any, call: Indexer, where: Where, block_size: int, causal: bool, score: Tensor) -> None:
    at = places.place(where, call.idx_q.shape[0], call.idx_k.shape[0], block_size, call.idx_q.device)
    scales = applied_scales(call, at.cu_seqlens_q)
    kernel(
        call.idx_q,
        *scales.of_queries,
        call.idx_k,
        *scales.of_keys,
        at.page_table,
        at.cu_seqlens_q,
        at.cu_seqlens_k,
        at.seqused_k,
        at.q_positions,
        score,
        at.use_seqused,
        at.use_positions if causal else 0,
        *scales.flags,
        int(causal),
    )


SCHEMA = (
    f"Tensor idx_q, Tensor idx_k, {ARGUMENTS}, SymInt block_size, bool causal, bool token_major, "
    "SymInt num_blocks, Tensor? q_scale, Tensor? k_scale, str backend"
)
_OPERATOR = registration.define(
    "index_score",
    SCHEMA,
    ("out",),
    allocate_scores,
    shards.scores(functools.partial(write_scores, "index_score", _launch)),
)
