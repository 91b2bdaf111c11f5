"""topk_select: exp-free top-k over block scores."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from msa_tiles import reference
from msa_tiles.ops import _contents, _dispatch, _library, _shard, _validate, _where
from msa_tiles.ops._where import Where

Launch = Callable[..., None]

# Where num_kv_heads stands among the arguments of `SCHEMA`.
NUM_KV_HEADS = 10

# The numbers by which kernels know the orders.
ORDERS = {"ascending": 0, "score": 1, "local_last": 2}


def topk_select(
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
    """The ``topk`` best blocks of every query: int32 [Hkv, T, topk], ``min(topk, valid)`` ids and then -1.

    ``score`` [Hi, T, NB], or [T, Hi, NB] for ``layout="token_major"``; kernels take float32. With ``num_kv_heads``
    below Hi the scores of one group are reduced by max. A row's valid blocks follow from its query's position (without
    key lengths a request has as many keys as queries) or are the first ``num_valid_blocks``, an integer or int32 [T].
    The ``init_blocks`` first and ``local_blocks`` last valid blocks are always in, init first where both do not fit.
    Equal scores: the lower id wins; NaN ranks below -inf. ``order`` is ``ascending``, ``score`` (init, local, then
    descending scores) or ``local_last`` (init, descending scores, local). ``out`` is the caller's buffer for the ids.
    """
    where = Where(cu_seqlens_q, cu_seqlens_k, page_table, seqused_k, max_seqlen_q, max_seqlen_k, q_positions, k_offset)
    arguments = topk_arguments(
        score, topk, where, check, num_kv_heads, num_valid_blocks, block_size, init_blocks, local_blocks, order, layout,
        backend,
    )  # fmt: skip
    return run(_OPERATOR, arguments, out)


def topk_arguments(
    score: Tensor,
    topk: int,
    where: Where,
    check: bool,
    num_kv_heads: int | None,
    num_valid_blocks: int | Tensor | None,
    block_size: int,
    init_blocks: int,
    local_blocks: int,
    order: str,
    layout: str,
    backend: str,
) -> tuple[Any, ...]:
    """Validate a call that ranks scores; the arguments of `SCHEMA`."""
    layout_dims = "[T, Hi, NB]" if layout == "token_major" else "[Hi, T, NB]"
    _validate.one_of("layout", layout, _validate.LAYOUTS)
    _validate.floating("score", score, layout_dims)
    if layout == "token_major":
        score = score.transpose(0, 1)
    num_heads, total_q, width = score.shape
    num_kv_heads = selection("score", num_heads, topk, num_kv_heads, block_size, init_blocks, local_blocks, order)
    _validate.backend(backend, score.device)
    where.validate(total_q, score, "score", None, check)
    valid_tensor, valid_number = None, None
    if isinstance(num_valid_blocks, Tensor):
        valid_tensor = _validate.int32("num_valid_blocks", num_valid_blocks, [total_q], "[T]", score, "score")
        _validate.dense("num_valid_blocks", num_valid_blocks)
        if check:
            _contents.check_valid_blocks("num_valid_blocks", num_valid_blocks, width)
    elif num_valid_blocks is not None:
        _validate.integer("num_valid_blocks", num_valid_blocks, 0)
        if num_valid_blocks > width:
            _validate.refuse("num_valid_blocks", str(num_valid_blocks), f"at most the {width} columns of score")
        valid_number = num_valid_blocks
    elif check:
        _contents.check_score_width(width, where, total_q, block_size, score, None)
    return (
        score,
        topk,
        *where.arguments(),
        num_kv_heads,
        valid_tensor,
        valid_number,
        block_size,
        init_blocks,
        local_blocks,
        order,
        backend,
    )


def run(operator: _library.OperatorPair, arguments: tuple[Any, ...], out: Tensor | None) -> Tensor:
    """Call the operator, into the caller's buffer where there is one."""
    if out is None:
        return operator.functional(*arguments)
    score, topk, num_kv_heads = arguments[0], arguments[1], arguments[NUM_KV_HEADS]
    shape = [num_kv_heads, score.shape[1], topk]
    _validate.destination("out", out, shape, "[Hkv, T, topk]", torch.int32, score, "score")
    operator.mutating(*arguments, out)
    return out


def selection(
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
    _validate.integer("topk", topk, 1)
    _validate.integer("block_size", block_size, 1)
    _validate.integer("init_blocks", init_blocks, 0)
    _validate.integer("local_blocks", local_blocks, 0)
    _validate.one_of("order", order, tuple(ORDERS))
    if num_heads == 0:
        _validate.refuse(name, "0 index heads", "at least 1")
    if num_kv_heads is None:
        return num_heads
    _validate.integer("num_kv_heads", num_kv_heads, 1)
    if num_heads % num_kv_heads != 0:
        _validate.refuse("num_kv_heads", str(num_kv_heads), f"a divisor of the {num_heads} index heads of {name}")
    return num_kv_heads


def allocate_ids(like: Tensor, num_kv_heads: int, total_q: int, topk: int) -> Tensor:
    """An uninitialised int32 [Hkv, T, topk]."""
    return like.new_empty((num_kv_heads, total_q, topk), dtype=torch.int32)


def allocate_chosen(score: Tensor, topk: int, *rest: Any) -> tuple[Tensor, ...]:
    num_kv_heads = rest[NUM_KV_HEADS - 2]
    return (allocate_ids(score, num_kv_heads, score.shape[1], topk),)


def write_chosen(
    op: str, variant: Callable[[int, int], dict[str, int]], launch: Launch, score: Tensor, topk: int, *rest: Any
) -> None:
    """Fill the last argument: by the reference, or by ``launch`` when there are scores.

    ``variant(topk, width)`` names the kernel's compile-time dims.
    """
    place, rest = rest[:8], rest[8:]
    num_kv_heads, valid_tensor, valid_number, block_size, init_blocks, local_blocks, order, backend, out = rest
    where = Where(*place)
    if _dispatch.runs_reference(backend, score.device):
        out.copy_(
            reference.topk_select(
                score,
                topk,
                num_kv_heads=num_kv_heads,
                num_valid_blocks=valid_number if valid_tensor is None else valid_tensor,
                block_size=block_size,
                init_blocks=init_blocks,
                local_blocks=local_blocks,
                order=order,
                **where.keywords(),
            )
        )
        return
    refusals = _dispatch.broken_rules(op, topk=topk, max_blocks=score.shape[2])
    if score.dtype != torch.float32:
        refusals = (f"score is {score.dtype}, wanted torch.float32", *refusals)
    facts = _dispatch.call_facts(
        op,
        # Positions play no part when the number of valid blocks is given, and pages never do.
        _positions_only(where, valid_tensor is not None or valid_number is not None),
        score.device,
        "bf16",
        variant(topk, score.shape[2]),
        refusals=refusals,
        queries=score.shape[1],
    )
    kernel = _dispatch.find_kernel(facts, backend)
    if out.numel() == 0:
        return
    if score.numel() == 0 or where.num_requests == 0:
        out.fill_(-1)
        return
    mode = 2 if valid_tensor is not None else int(valid_number is not None)
    counts = (mode, valid_number or 0, block_size, init_blocks, local_blocks, ORDERS[order])
    launch(kernel, score, where, block_size, valid_tensor, out, counts)


def launch_topk(
    lanes: Callable[[Tensor], tuple[int, ...]],
    kernel: Any,
    score: Tensor,
    where: Where,
    block_size: int,
    num_valid: Tensor | None,
    out: Tensor,
    parameters: tuple[int, ...],
) -> None:
    """Launch a kernel that ranks scores; ``lanes(out)`` are the arguments that it takes beside those of the others."""
    at = _dispatch.place(where, score.shape[1], None, block_size, score.device)
    kernel(
        score,
        at.cu_seqlens_q,
        at.cu_seqlens_k,
        at.seqused_k,
        at.q_positions,
        at.cu_seqlens_q if num_valid is None else num_valid,
        out,
        at.use_seqused,
        at.use_positions,
        *parameters,
        *lanes(out),
    )


def _lanes_log2(rows: int) -> int:
    """Of how many shares of its most rows a warp takes one, as a power of two: all when the rows alone fill a GPU."""
    return 0 if rows >= 1 << 17 else 2 if rows >= 1 << 13 else 5


def _positions_only(where: Where, counted: bool) -> Where:
    if counted:
        where = replace(where, q_positions=None, k_offset=None)
    return where.without_pages()


SCHEMA = (
    f"Tensor score, SymInt topk, {_where.ARGUMENTS}, SymInt num_kv_heads, Tensor? num_valid_blocks, "
    "SymInt? num_valid_blocks_scalar, SymInt block_size, SymInt init_blocks, SymInt local_blocks, str order, "
    "str backend"
)
_OPERATOR = _library.define(
    "topk_select",
    SCHEMA,
    ("out",),
    allocate_chosen,
    _shard.ranking(
        functools.partial(
            write_chosen,
            "topk_select",
            lambda topk, width: {"topk": topk},
            functools.partial(launch_topk, lambda out: (_lanes_log2(out.shape[0] * out.shape[1]),)),
        )
    ),
)
