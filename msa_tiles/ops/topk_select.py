"""topk_select: exp-free top-k over block scores."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from msa_tiles import reference
from msa_tiles.call import contents, validate
from msa_tiles.call.selection import ORDERS, selection
from msa_tiles.call.where import ARGUMENTS, Where
from msa_tiles.launch import lookup, places, shards
from msa_tiles.library import registration, remember

# Where num_kv_heads stands among the arguments of `SCHEMA`.
NUM_KV_HEADS = 10


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
    return call_topk(
        _OPERATOR, _PREPARE, _SEEN, score, topk, where, check, num_kv_heads, num_valid_blocks, block_size, init_blocks,
        local_blocks, order, layout, out, backend,
    )  # fmt: skip


def call_topk(
    operator: registration.OperatorPair,
    prepare: Callable[..., Ranking | None],
    seen: remember.Remembered[Ranking],
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
    out: Tensor | None,
    backend: str,
) -> Tensor:
    """An operator that ranks scores, by what was `seen` of the call or the whole way."""
    call = None
    if out is not None and not check and where.k_offset is None:
        counts, count = (num_valid_blocks, None) if isinstance(num_valid_blocks, Tensor) else (None, num_valid_blocks)
        scalars = (
            topk, where.max_seqlen_q, where.max_seqlen_k, num_kv_heads, count, block_size, init_blocks, local_blocks,
            order, layout, backend,
        )  # fmt: skip
        call = remember.signature((score, *where.tensors(), counts, out), scalars)
        launch = seen.get(call)
        if launch is not None:
            launch(score.transpose(0, 1) if layout == "token_major" else score, where, counts, out)
            registration.written((out,))
            return out
    arguments = topk_arguments(
        score, topk, where, check, num_kv_heads, num_valid_blocks, block_size, init_blocks, local_blocks, order, layout,
        backend,
    )  # fmt: skip
    if out is None:
        return operator.functional(*arguments)
    shape = [arguments[NUM_KV_HEADS], arguments[0].shape[1], topk]
    validate.destination("out", out, shape, "[Hkv, T, topk]", torch.int32, score, "score")
    operator.mutating(*arguments, out)
    if call is not None:
        seen.keep(call, prepare(*arguments, out))
    return out


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
    validate.one_of("layout", layout, validate.LAYOUTS)
    validate.floating("score", score, layout_dims)
    if layout == "token_major":
        score = score.transpose(0, 1)
    num_heads, total_q, width = score.shape
    num_kv_heads = selection("score", num_heads, topk, num_kv_heads, block_size, init_blocks, local_blocks, order)
    validate.backend(backend, score.device)
    where.validate(total_q, score, "score", None)
    if check:
        contents.check_where(where, total_q, None)
    valid_tensor, valid_number = None, None
    if isinstance(num_valid_blocks, Tensor):
        valid_tensor = validate.int32("num_valid_blocks", num_valid_blocks, [total_q], "[T]", score, "score")
        validate.dense("num_valid_blocks", num_valid_blocks)
        if check:
            contents.check_valid_blocks("num_valid_blocks", num_valid_blocks, width)
    elif num_valid_blocks is not None:
        validate.integer("num_valid_blocks", num_valid_blocks, 0)
        if num_valid_blocks > width:
            validate.refuse("num_valid_blocks", str(num_valid_blocks), f"at most the {width} columns of score")
        valid_number = num_valid_blocks
    elif check:
        contents.check_score_width(width, where, total_q, block_size, score, None)
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


def allocate_ids(like: Tensor, num_kv_heads: int, total_q: int, topk: int) -> Tensor:
    """An uninitialised int32 [Hkv, T, topk]."""
    return like.new_empty((num_kv_heads, total_q, topk), dtype=torch.int32)


def allocate_chosen(score: Tensor, topk: int, *rest: Any) -> tuple[Tensor, ...]:
    num_kv_heads = rest[NUM_KV_HEADS - 2]
    return (allocate_ids(score, num_kv_heads, score.shape[1], topk),)


@dataclass(frozen=True)
class Ranking:
    """A kernel ready to rank scores of certain shapes; ``lanes`` is what it takes beside what the others do."""

    kernel: Any
    block_size: int
    parameters: tuple[int, ...]
    lanes: tuple[int, ...]

    def __call__(self, score: Tensor, where: Where, num_valid: Tensor | None, out: Tensor) -> None:
        at = places.place(where, score.shape[1], None, self.block_size, score.device)
        self.kernel(
            score,
            at.cu_seqlens_q,
            at.cu_seqlens_k,
            at.seqused_k,
            at.q_positions,
            at.cu_seqlens_q if num_valid is None else num_valid,
            out,
            at.use_seqused,
            at.use_positions,
            *self.parameters,
            *self.lanes,
        )


def prepare_chosen(
    op: str,
    variant: Callable[[int, int], dict[str, int]],
    lanes: Callable[[Tensor], tuple[int, ...]],
    score: Tensor,
    topk: int,
    *rest: Any,
) -> Ranking | None:
    """What runs the kernel of a validated call; None on the reference, and where a size is 0.

    ``variant(topk, width)`` names the kernel's compile-time dims, ``lanes(out)`` are the arguments of its own.
    """
    where = Where(*rest[:8])
    _, valid_tensor, valid_number, block_size, init_blocks, local_blocks, order, backend, out = rest[8:]
    if lookup.runs_reference(backend, score.device):
        return None
    refusals = lookup.broken_rules(op, topk=topk, max_blocks=score.shape[2])
    if score.dtype != torch.float32:
        refusals = (f"score is {score.dtype}, wanted torch.float32", *refusals)
    facts = lookup.call_facts(
        op,
        # Positions play no part when the number of valid blocks is given, and pages never do.
        _positions_only(where, valid_tensor is not None or valid_number is not None),
        score.device,
        "bf16",
        variant(topk, score.shape[2]),
        refusals=refusals,
        queries=score.shape[1],
        heads=score.shape[0],
    )
    kernel = lookup.find_kernel(facts, backend)
    if out.numel() == 0 or score.numel() == 0 or where.num_requests == 0:
        return None
    mode = 2 if valid_tensor is not None else int(valid_number is not None)
    counts = (mode, valid_number or 0, block_size, init_blocks, local_blocks, ORDERS[order])
    return Ranking(kernel, block_size, counts, lanes(out))


def write_chosen(prepare: Callable[..., Ranking | None], score: Tensor, topk: int, *rest: Any) -> None:
    """Fill the last argument: by the reference, or by what ``prepare`` finds for the call."""
    where = Where(*rest[:8])
    num_kv_heads, valid_tensor, valid_number, block_size, init_blocks, local_blocks, order, backend, out = rest[8:]
    if lookup.runs_reference(backend, score.device):
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
    launch = prepare(score, topk, *rest)
    if launch is None:
        out.fill_(-1)
    else:
        launch(score, where, valid_tensor, out)


def _lanes_log2(rows: int) -> int:
    """Of how many shares of its most rows a warp takes one, as a power of two: all when the rows alone fill a GPU."""
    return 0 if rows >= 1 << 17 else 2 if rows >= 1 << 13 else 5


def _positions_only(where: Where, counted: bool) -> Where:
    if counted:
        where = replace(where, q_positions=None, k_offset=None)
    return where.without_pages()


SCHEMA = (
    f"Tensor score, SymInt topk, {ARGUMENTS}, SymInt num_kv_heads, Tensor? num_valid_blocks, "
    "SymInt? num_valid_blocks_scalar, SymInt block_size, SymInt init_blocks, SymInt local_blocks, str order, "
    "str backend"
)
_SEEN: remember.Remembered[Ranking] = remember.Remembered()
_PREPARE = functools.partial(
    prepare_chosen,
    "topk_select",
    lambda topk, width: {"topk": topk},
    lambda out: (_lanes_log2(out.shape[0] * out.shape[1]),),
)
_OPERATOR = registration.define(
    "topk_select", SCHEMA, ("out",), allocate_chosen, shards.ranking(functools.partial(write_chosen, _PREPARE))
)
